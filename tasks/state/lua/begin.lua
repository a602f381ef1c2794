-- Starts an attempt, unless the verdict says otherwise, and stores for Celery that its task has started.
-- KEYS: entry, cancel, Celery's result. ARGV: begin token, worker, most failures, 1 if alone, token of taking ('any' is not
-- checked), what Celery stores or '', seconds to keep that or ''.
-- Returns verdict, attempt, failures, seconds since it was submitted or might run; of an attempt that has started also the
-- earlier attempts that were not reported, the time, and the `seq` of its first event.
local job, cancel = KEYS[1], KEYS[2]
local run, worker, limit, alone, token = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local found = redis.call('HMGET', job, 'state', 'holder', 'submitted_at', 'failures', 'run', 'delay', 'began_at',
                         'left_at', 'lost', 'worker', 'before')
local state = found[1]
if not state then return {'gone', 0, 0, '0'} end
local waited = stamp(math.max(0, clock() - tonumber(found[3]) - tonumber(found[6] or 0)))
if state == 'done' then return {'done', 0, 0, waited} end
if token ~= 'any' and found[2] ~= token then return {'superseded', 0, 0, waited} end
if alone ~= '1' and tonumber(found[4] or 0) > 0 then return {'suspect', 0, 0, waited} end
local now = clock()
if found[5] ~= run then -- else the reply was lost, and this is the second question
  if found[5] then
    local began_at, left_at, lost = found[7] or stamp(now), found[8] or stamp(now), found[9] or '1'
    local before = table.concat({found[5], began_at, left_at, lost, found[10]}, ' ')
    if lost == '1' and found[11] and #found[11] < 2000 then before = found[11] .. '\n' .. before end -- it told nothing
    redis.call('HSET', job, 'before', before)
    redis.call('HDEL', job, 'left_at', 'lost')
  end
  redis.call('HSET', job, 'began_at', stamp(now), 'first_seq', redis.call('HGET', job, 'next_seq') or 0)
  redis.call('HINCRBY', job, 'attempt', 1)
  redis.call('HINCRBY', job, 'failures', 1) -- until this attempt shows a token
end
redis.call('HSET', job, 'state', 'running', 'run', run, 'worker', worker)
if ARGV[6] ~= '' then tell_celery(KEYS[3], ARGV[6], ARGV[7]) end
local counts = redis.call('HMGET', job, 'attempt', 'failures', 'before', 'next_seq')
local attempt, failures, before = tonumber(counts[1]), tonumber(counts[2]), counts[3] or ''
local verdict = 'run'
if redis.call('EXISTS', cancel) == 1 then verdict = 'cancelled' elseif failures > limit then verdict = 'dead' end
return {verdict, attempt, failures, waited, before, stamp(now), tonumber(counts[4] or 0)}
