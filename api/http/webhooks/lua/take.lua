-- Takes due deliveries under a lease, up to a limit per endpoint. `clock` and `stamp`: tasks/connection/redis_clock.py.
-- KEYS: due. ARGV: prefix of deliveries, limit, lease (s), token, how many due deliveries to check, limit per endpoint; then each
-- endpoint with attempts in progress, and their number. Returns the id and the fields of each delivery.
local now = clock()
local num_to, taken = {}, {}
for at = 7, #ARGV, 2 do num_to[ARGV[at]] = tonumber(ARGV[at + 1]) end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[5])) do
  if #taken >= tonumber(ARGV[2]) then break end
  local key = ARGV[1] .. id
  local endpoint = redis.call('HGET', key, 'endpoint')
  if not endpoint then
    redis.call('ZREM', KEYS[1], id) -- the delivery has expired
  elseif (num_to[endpoint] or 0) >= tonumber(ARGV[6]) then
    redis.call('ZADD', KEYS[1], stamp(now + 1), id) -- postponed, so that deliveries to other endpoints are found
  else
    num_to[endpoint] = (num_to[endpoint] or 0) + 1
    redis.call('ZADD', KEYS[1], stamp(now + ARGV[3]), id)
    redis.call('HINCRBY', key, 'attempts', 1)
    redis.call('HSET', key, 'token', ARGV[4])
    taken[#taken + 1] = {id, redis.call('HGETALL', key)}
  end
end
return taken
