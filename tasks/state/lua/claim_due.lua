-- Claims jobs that are due: no other reaper gets them within the given time. If this one dies, they are due again then.
-- ARGV: most jobs, seconds. Returns their ids, each followed by the job's state. An ended job that a worker still holds is
-- left to that worker, and has the state 'held'.
local most, claim_s = ARGV[1], tonumber(ARGV[2])
local MAX_WAIT_S = 3600 -- between two attempts to settle a job whose next step can't be sent
local claimed = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', stamp(clock()), 'LIMIT', 0, most)) do
  local state = redis.call('HGET', JOB .. id, 'state')
  if not state then
    redis.call('ZREM', DUE, id) -- Redis has evicted it, or it was deleted
  else
    local wait_s = claim_s
    if state == 'done' and redis.call('ZSCORE', LEASES, id) then
      state = 'held'
    elseif state == 'done' then -- what follows the job could perhaps not be sent: retry less and less often
      wait_s = math.min(MAX_WAIT_S, claim_s * 2 ^ (redis.call('HINCRBY', JOB .. id, 'num_settlings', 1) - 1))
    end
    redis.call('ZADD', DUE, stamp(clock() + wait_s), id)
    claimed[#claimed+1] = id
    claimed[#claimed+1] = state
  end
end
return claimed
