-- Puts messages back into their queues: of workers that have not renewed their leases, and of jobs whose ETA has come.
-- Any worker may call it at any time. KEYS: time of the last call. ARGV: lease in seconds, most messages of either sort.
-- Returns how many leases had ended, and how many jobs were delayed until now.
local called = KEYS[1]
local lease_s, most, now = tonumber(ARGV[1]), ARGV[2], clock()
local function requeue_all(set)
  local ids = redis.call('ZRANGEBYSCORE', set, '-inf', stamp(now), 'LIMIT', 0, most)
  for _, id in ipairs(ids) do requeue(JOB .. id, CANCEL .. id, id) end
  return #ids
end
local num_delayed = requeue_all(DELAYED)
local last_at = tonumber(redis.call('GET', called) or 0)
redis.call('SET', called, stamp(now))
if now < last_at or now - last_at > lease_s / 3 then
  -- No reaper could call, so perhaps no worker could renew: an outage, another clock after a failover, or no worker at all.
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', stamp(now + lease_s / 2))) do
    redis.call('ZADD', LEASES, stamp(now + lease_s / 2), id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, stamp(now + lease_s), '+inf')) do
    redis.call('ZADD', LEASES, stamp(now + lease_s), id)
  end
  return {0, num_delayed}
end
return {requeue_all(LEASES), num_delayed}
