-- Gives back the messages of workers that have not renewed their leases. Any worker may ask, at any time.
-- KEYS: time of the last look. ARGV: lease in seconds, most messages, prefix of entries, prefix of cancels.
-- Returns how many were given back.
local lease, now = tonumber(ARGV[1]), clock()
local looked_at = tonumber(redis.call('GET', KEYS[1]) or 0)
redis.call('SET', KEYS[1], stamp(now))
if now < looked_at or now - looked_at > lease / 3 then
  -- No reaper could look, so perhaps no worker could renew: an outage, another clock after a failover, or no worker at all.
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', stamp(now + lease / 2))) do
    redis.call('ZADD', LEASES, stamp(now + lease / 2), id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, stamp(now + lease), '+inf')) do
    redis.call('ZADD', LEASES, stamp(now + lease), id)
  end
  return 0
end
local ended = redis.call('ZRANGEBYSCORE', LEASES, '-inf', stamp(now), 'LIMIT', 0, ARGV[2])
for _, id in ipairs(ended) do
  give_back(ARGV[3] .. id, ARGV[4] .. id, id)
end
return #ended
