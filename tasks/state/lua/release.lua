-- Celery is done with a message. Who does not hold it any more changes nothing.
-- KEYS: entry. ARGV: id, token of taking, seconds in which a job that never ran gets its end.
local job, id = KEYS[1], ARGV[1]
local found = redis.call('HMGET', job, 'holder', 'state')
if found[1] ~= ARGV[2] then return 0 end
let_go(job, id)
if found[2] == 'queued' or found[2] == 'handed_back' then
  -- Celery has refused it, or tells of a revoke next. It is not queued again; if Celery does not end it, the reaper does.
  redis.call('HDEL', job, 'message')
  redis.call('ZADD', DUE, stamp(clock() + ARGV[3]), id)
end
return 1
