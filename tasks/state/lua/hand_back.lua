-- Ends an attempt before its job, for another worker to continue it. It was not a failure. Its message follows (requeue.lua).
-- KEYS: entry. ARGV: id, run. Returns 1 if the attempt was the current one.
local job = KEYS[1]
local id, run = unpack(ARGV)
local found = redis.call('HMGET', job, 'run', 'state', 'queue', 'priority', 'submitted_at', 'failures')
local current_run, state, queue, priority, submitted_at, failures = unpack(found, 1, 6)
if current_run ~= run or state ~= 'running' then return 0 end
redis.call('HSET', job, 'state', 'handed_back', 'left_at', stamp(clock()), 'lost', 0)
if tonumber(failures or 0) > 0 then redis.call('HINCRBY', job, 'failures', -1) end -- else it has shown a token
redis.call('ZREM', RUNNING, id)
wait_in_queue(id, queue, tonumber(priority), tonumber(submitted_at))
return 1
