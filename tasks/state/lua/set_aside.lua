-- The message waits for its ETA in no worker's hands: its lease ends then, and the message goes back to its queue.
-- KEYS: entry. ARGV: id, token of taking, seconds until then. Who does not hold it any more changes nothing.
local job, id = KEYS[1], ARGV[1]
local found = redis.call('HMGET', job, 'holder', 'queue')
if found[1] ~= ARGV[2] then return 0 end
redis.call('ZADD', LEASES, stamp(clock() + ARGV[3]), id)
redis.call('ZREM', WAITING .. found[2], id)
return 1
