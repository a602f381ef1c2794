-- The job shall end. KEYS: entry, cancel. ARGV: id, 1 if a running one shall, too, seconds to remember that.
-- Returns its state; a running one whose worker is gone waits again. One without a holder, whose message Celery has acked
-- because it ends it, has its last step: what the worker writes then is its end.
local job, cancel, id = KEYS[1], KEYS[2], ARGV[1]
local found = redis.call('HMGET', job, 'state', 'holder')
local state, holder = found[1], found[2]
if state == 'done' then return state end
if ARGV[2] == '1' then
  redis.call('SETEX', cancel, ARGV[3], '1') -- who begins it from now on sees this
  local ends_at = redis.call('ZSCORE', LEASES, id)
  if state == 'running' and holder and not (ends_at and tonumber(ends_at) > clock()) and give_back(job, cancel, id) then
    state = 'handed_back'
  end
end
return state or ''
