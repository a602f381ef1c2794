-- Changes a record if it is as the caller thinks (docs/adr/019-batches.md, "States").
-- KEYS: the record; the lease under which it is changed, or '' for none; the stream of what is announced (docs/adr/021-webhooks.md).
-- ARGV: the token of that lease; the statuses it may have, as a JSON list; the life of the record in s; how many entries that stream
-- may have; how long an announcement is, and that: field, value, …; field, value, … of the record.
-- Returns {1, status} of the changed record, or {0, status} of one that stays as it is, '' if there is none.
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
