-- Notes jobs and pushes their messages, all or none. A job that stands there already is left as it is.
-- KEYS: entry and message list of each job. ARGV: seconds between two jobs, how many jobs follow in other calls, then
-- ten values for each job, and topic and event for each of its events.
-- Returns for each job: 1 new, 0 there already, -1 there already with another payload under its idempotency key; and how
-- many heard an event, -1 if there was none.
local step, following, next, told, now, heard = tonumber(ARGV[1]), tonumber(ARGV[2]), 3, {}, clock(), -1
for i = 1, #KEYS / 2 do
  local job, list = KEYS[2*i-1], KEYS[2*i]
  local id, task, queue, priority, timeout, delay, digest, work, message, events = unpack(ARGV, next, next + 9)
  local first = next + 10
  next = first + 2 * events
  if redis.call('EXISTS', job) == 1 then
    told[i] = (digest == '' or redis.call('HGET', job, 'digest') == digest) and 0 or -1
  else
    told[i] = 1
    local submitted_at = now - math.min(1, (#KEYS / 2 - i + following) * step)
    note(job, id, task, queue, list, tonumber(priority), timeout, message, submitted_at)
    redis.call('HSET', job, 'work', work)
    if delay ~= '0.0' then redis.call('HSET', job, 'delay', delay) end
    if digest ~= '' then redis.call('HSET', job, 'digest', digest) end
    if message ~= '' then redis.call('LPUSH', list, message) end
    for at = first, next - 2, 2 do heard = math.max(heard, redis.call('PUBLISH', ARGV[at], ARGV[at+1])) end
  end
end
return {told, heard}
