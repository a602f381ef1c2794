-- Functions that the scripts of limits share. `clock` and `stamp`: tasks/connection/redis_clock.py. Keys: contract/keys.py.
--   admissions  zset: id of a request → when it was admitted. 'x' .. id is added when its tokens are charged.
--               'xx' .. id is added if it used more tokens than that, and the first charge has left the window.
--   charges     hash: the same ids → tokens, and the sums over the window, 'requests' and 'tokens'
--   jobs        zset: one lease per job of a request in progress → when the lease expires

local function lease_of(id, place)
  return id .. ':' .. place
end

local function requests_of(id)
  return string.sub(id, 1, 1) == 'x' and 0 or 1
end

-- Adds a charge to the window. Both keys expire together, after all of their entries have left the window.
local function charge(admissions, charges, id, now, window, tokens)
  redis.call('ZADD', admissions, stamp(now), id)
  redis.call('HSET', charges, id, tokens)
  redis.call('HINCRBY', charges, 'requests', requests_of(id))
  redis.call('HINCRBY', charges, 'tokens', tokens)
  redis.call('EXPIRE', admissions, 2 * window)
  redis.call('EXPIRE', charges, 2 * window)
end

-- Removes the entries that have left the window. Returns the requests and tokens that remain in it.
local function charged(admissions, charges, now, window)
  while true do
    local old = redis.call('ZRANGEBYSCORE', admissions, '-inf', stamp(now - window), 'LIMIT', 0, 500)
    if #old == 0 then break end
    local requests, tokens = 0, 0
    for at, of_id in ipairs(redis.call('HMGET', charges, unpack(old))) do
      requests = requests + requests_of(old[at])
      tokens = tokens + tonumber(of_id or 0)
    end
    redis.call('ZREM', admissions, unpack(old))
    redis.call('HDEL', charges, unpack(old))
    redis.call('HINCRBY', charges, 'requests', 0 - requests) -- not -requests: that may be "-0", which Redis rejects as an integer
    redis.call('HINCRBY', charges, 'tokens', 0 - tokens)
  end
  local sums = redis.call('HMGET', charges, 'requests', 'tokens')
  return tonumber(sums[1] or 0), tonumber(sums[2] or 0)
end
