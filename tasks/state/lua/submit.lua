-- Notes jobs and pushes their messages, all or none. A job that has an entry already is left as it is.
-- KEYS: entry and list of each job.
-- ARGV: seconds between two jobs, how many jobs follow in other calls; then for each job: id, task, queue, priority, timeout or
-- '', delay, digest of its payload if it has an idempotency key or '', work, message, number of events; and topic and event of
-- each of its events.
-- Returns for each job 1 (new), 0 (there already) or -1 (there already with another payload under its idempotency key); and
-- how many subscribers got an event, -1 if there was none.
local step_s, num_following = tonumber(ARGV[1]), tonumber(ARGV[2])
local NUM_VALUES = 10
local num_jobs, now, verdicts, num_subscribers = #KEYS / 2, clock(), {}, -1
local at = 3
for i = 1, num_jobs do
  local job, list = KEYS[2*i-1], KEYS[2*i]
  local id, task, queue, priority, timeout, delay, digest, work, message, num_events = unpack(ARGV, at, at + NUM_VALUES - 1)
  local first_event = at + NUM_VALUES
  at = first_event + 2 * num_events
  if redis.call('EXISTS', job) == 1 then
    verdicts[i] = (digest == '' or redis.call('HGET', job, 'digest') == digest) and 0 or -1
  else
    verdicts[i] = 1
    local submitted_at = now - math.min(1, (num_jobs - i + num_following) * step_s)
    note(job, id, task, queue, list, tonumber(priority), timeout, message, submitted_at)
    redis.call('HSET', job, 'work', work)
    if delay ~= '0.0' then redis.call('HSET', job, 'delay', delay) end
    if digest ~= '' then redis.call('HSET', job, 'digest', digest) end
    if message ~= '' then redis.call('LPUSH', list, message) end
    for event = first_event, at - 2, 2 do
      num_subscribers = math.max(num_subscribers, redis.call('PUBLISH', ARGV[event], ARGV[event+1]))
    end
  end
end
return {verdicts, num_subscribers}
