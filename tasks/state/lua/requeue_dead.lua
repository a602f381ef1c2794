-- A dead job becomes a new one. KEYS: entry, new entry, list. ARGV: id, new id, message. Returns 0 if it is not dead.
if redis.call('ZREM', DEAD, ARGV[1]) == 0 then return 0 end
local found = redis.call('HMGET', KEYS[1], 'task', 'queue', 'priority')
note(KEYS[2], ARGV[2], found[1], found[2], KEYS[3], tonumber(found[3]), '', ARGV[3], clock())
redis.call('LPUSH', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[1], 'message')
return 1
