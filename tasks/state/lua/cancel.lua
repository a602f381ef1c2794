-- Cancels a job as far as Redis can. The caller ends it if it waits, and a worker that runs it reads the key `cancel`.
-- KEYS: entry, cancel. ARGV: id, 1 if a running job must end too, seconds to remember that.
-- Returns the job's state or ''. A running job whose worker is gone waits again. A job without a holder, whose message Celery
-- has acked because it ends the job, is in its last step: what the worker writes then is its end.
local job, cancel = unpack(KEYS)
local id, ends_running, kept_s = unpack(ARGV)
local state, holder = unpack(redis.call('HMGET', job, 'state', 'holder'), 1, 2)
if state == 'done' then return state end
if ends_running == '1' then
  redis.call('SETEX', cancel, kept_s, '1') -- each attempt that starts from now on reads this
  local lease_ends_at = tonumber(redis.call('ZSCORE', LEASES, id) or 0)
  if state == 'running' and holder and lease_ends_at <= clock() and requeue(job, cancel, id) then state = 'handed_back' end
end
return state or ''
