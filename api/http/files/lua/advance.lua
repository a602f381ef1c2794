-- Changes a record if its status is one of the expected ones (docs/adr/019-batches.md, "States").
-- KEYS: the record; the lease under which it is changed, or ''; the stream of announcements (docs/adr/021-webhooks.md).
-- ARGV: the token of the lease; the expected statuses as a JSON list; the TTL of the record in s; the maximum length of the stream;
-- the number of values in the announcement, and the announcement: field, value, …; then field, value, … of the record.
-- Returns {1, status} if the record was changed, else {0, status}, with '' for a missing record.
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return {0, ''} end
if KEYS[2] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[1] then return {0, status} end
local fits = false
for _, allowed in ipairs(cjson.decode(ARGV[2])) do
  if cjson.encode(allowed) == status then fits = true end
end
if not fits then return {0, status} end
local first = 6 + ARGV[5]
redis.call('HSET', KEYS[1], unpack(ARGV, first))
if first > 6 then redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', unpack(ARGV, 6, first - 1)) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {1, redis.call('HGET', KEYS[1], 'status')}
