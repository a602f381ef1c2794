-- Makes a record, unless there is one, or the tenant has no room for it. KEYS: the record; its tenant's index, which forgets what is too old
-- to be there. ARGV: the id; when it was made, unix s; its life in s; the longest life of any; how many records the tenant may have, and how
-- many bytes with them ('' for no limit); what the keys of records begin with; the bytes of this one; time or ''; field, value, …
-- Returns 1 if it was made, 0 if there was one, -1 if there is no room; how many there were, and their bytes, where that was asked.
local max_num, max_bytes = tonumber(ARGV[5]), tonumber(ARGV[6])
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 0, 0} end
local num, bytes = 0, 0
if max_num then
  num, bytes = used(KEYS[2], ARGV[7], clock(ARGV[9]))
  if num + 1 > max_num or bytes + tonumber(ARGV[8]) > max_bytes then return {-1, num, bytes} end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 10))
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', tonumber(ARGV[2]) - tonumber(ARGV[4]))
if redis.call('TTL', KEYS[2]) < tonumber(ARGV[3]) then redis.call('EXPIRE', KEYS[2], ARGV[3]) end
return {1, num, bytes}
