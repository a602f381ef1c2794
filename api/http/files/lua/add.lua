-- Makes a record, unless its id exists, or the quota of the tenant is exceeded. KEYS: the record; its tenant's index, from which old
-- entries are removed. ARGV: the id; its time of creation, unix s; its TTL in s; the longest life of any record in s; the tenant's limits of
-- records and bytes ('' for no limit); prefix of the records' keys; the bytes of this record; time or ''; field, value, …
-- Returns 1 if the record was made, 0 if its id existed, -1 if the quota is exceeded; then, if there is a limit, the number of the tenant's
-- other records, and their bytes.
local max_num, max_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 0, 0} end
local num, bytes = 0, 0
if max_num then
  num, bytes = usage(KEYS[2], ARGV[7], clock(ARGV[9]))
  if num + 1 > max_num or bytes + tonumber(ARGV[8]) > max_bytes then return {-1, num, bytes} end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 10))
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', tonumber(ARGV[2]) - tonumber(ARGV[4]))
if redis.call('TTL', KEYS[2]) < tonumber(ARGV[3]) then redis.call('EXPIRE', KEYS[2], ARGV[3]) end
return {1, num, bytes}
