-- Lets a job wait for its ETA without a worker that holds its message. Then `restore` puts it at the head of its queue.
-- KEYS: entry. ARGV: id, token of taking, seconds until then. Returns 0 if the worker does not hold the message.
local job = KEYS[1]
local id, token, wait_s = unpack(ARGV)
local holder, queue = unpack(redis.call('HMGET', job, 'holder', 'queue'), 1, 2)
if holder ~= token then return 0 end
drop_holder(job, id)
redis.call('ZADD', DELAYED, stamp(clock() + wait_s), id)
redis.call('ZREM', WAITING .. queue, id)
return 1
