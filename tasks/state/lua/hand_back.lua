-- The attempt ends before its job does, and was no failure; the message follows (give_back.lua).
-- KEYS: entry. ARGV: id, run.
local job, id = KEYS[1], ARGV[1]
local found = redis.call('HMGET', job, 'run', 'state', 'queue', 'priority', 'submitted_at', 'failures')
if found[1] ~= ARGV[2] or found[2] ~= 'running' then return 0 end
redis.call('HSET', job, 'state', 'handed_back', 'left_at', stamp(clock()), 'lost', 0)
if tonumber(found[6] or 0) > 0 then redis.call('HINCRBY', job, 'failures', -1) end -- else it has shown a token
redis.call('ZREM', RUNNING, id)
wait_in_queue(id, found[3], tonumber(found[4]), tonumber(found[5]))
return 1
