-- Starts an attempt, unless the verdict says otherwise, and stores for Celery that its task has started.
-- KEYS: entry, cancel, Celery's result. ARGV: run, worker, most failures, 1 if alone, token of taking ('any' is not checked),
-- what Celery stores or '', seconds to keep that or ''.
-- Returns verdict, attempt, failures, seconds since the job was submitted or might run. If an attempt has started, also the
-- earlier attempts that were not reported, the time, and the `seq` of its first event.
local job, cancel, result = unpack(KEYS)
local run, worker, most_failures, alone, token, stored, expires = unpack(ARGV)
local found = redis.call('HMGET', job, 'state', 'holder', 'submitted_at', 'failures', 'run', 'delay', 'began_at',
                         'left_at', 'lost', 'worker', 'before')
local state, holder, submitted_at, last_failures, last_run, delay = unpack(found, 1, 6)
local began_at, left_at, lost, last_worker, unreported = unpack(found, 7, 11)
if not state then return {'gone', 0, 0, '0'} end
local waited = stamp(math.max(0, clock() - tonumber(submitted_at) - tonumber(delay or 0)))
if state == 'done' then return {'done', 0, 0, waited} end
if token ~= 'any' and holder ~= token then return {'superseded', 0, 0, waited} end
if alone ~= '1' and tonumber(last_failures or 0) > 0 then return {'suspect', 0, 0, waited} end
local MAX_UNREPORTED = 2000 -- bytes
local now = stamp(clock())
if last_run ~= run then -- else the reply was lost, and this is the second question
  if last_run then
    lost = lost or '1'
    local before = table.concat({last_run, began_at or now, left_at or now, lost, last_worker}, ' ')
    if lost == '1' and unreported and #unreported < MAX_UNREPORTED then before = unreported .. '\n' .. before end
    redis.call('HSET', job, 'before', before)
    redis.call('HDEL', job, 'left_at', 'lost')
  end
  redis.call('HSET', job, 'began_at', now, 'first_seq', redis.call('HGET', job, 'next_seq') or 0)
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('HINCRBY', job, 'failures', 1) -- until this attempt shows a token
end
redis.call('HSET', job, 'state', 'running', 'run', run, 'worker', worker)
if stored ~= '' then store_state(result, stored, expires) end
local counts = redis.call('HMGET', job, 'attempt', 'failures', 'before', 'next_seq')
local attempt, failures, before, next_seq = tonumber(counts[1]), tonumber(counts[2]), counts[3] or '', tonumber(counts[4] or 0)
local verdict = 'run'
if redis.call('EXISTS', cancel) == 1 then
  verdict = 'cancelled'
elseif failures > tonumber(most_failures) then
  verdict = 'dead'
end
return {verdict, attempt, failures, waited, before, now, next_seq}
