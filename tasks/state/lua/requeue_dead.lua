-- Makes a new job of a dead one.
-- KEYS: entry, new entry, list. ARGV: id, new id, message. Returns 0 if the job is not dead.
local job, new_job, list = unpack(KEYS)
local id, new_id, message = unpack(ARGV)
if redis.call('ZREM', DEAD, id) == 0 then return 0 end
local task, queue, priority = unpack(redis.call('HMGET', job, 'task', 'queue', 'priority'), 1, 3)
note(new_job, new_id, task, queue, list, tonumber(priority), '', message, clock())
redis.call('LPUSH', list, message)
redis.call('HDEL', job, 'message')
return 1
