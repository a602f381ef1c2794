-- Puts messages back into their queues: of workers that have not renewed their leases, and of jobs whose ETA has come.
-- Any worker may call it at any time. KEYS: time of the last call. ARGV: lease in seconds, most messages of either sort.
-- Returns how many leases had ended, and how many jobs were delayed until now.
local lease, most, now = tonumber(ARGV[1]), ARGV[2], clock()
local function give_back_all(set)
  local ids = redis.call('ZRANGEBYSCORE', set, '-inf', stamp(now), 'LIMIT', 0, most)
  for _, id in ipairs(ids) do give_back(JOB .. id, CANCEL .. id, id) end
  return #ids
end
local num_delayed = give_back_all(DELAYED)
local last_at = tonumber(redis.call('GET', KEYS[1]) or 0)
redis.call('SET', KEYS[1], stamp(now))
if now < last_at or now - last_at > lease / 3 then
  -- No reaper could call, so perhaps no worker could renew: an outage, another clock after a failover, or no worker at all.
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', stamp(now + lease / 2))) do
    redis.call('ZADD', LEASES, stamp(now + lease / 2), id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, stamp(now + lease), '+inf')) do
    redis.call('ZADD', LEASES, stamp(now + lease), id)
  end
  return {0, num_delayed}
end
return {give_back_all(LEASES), num_delayed}
