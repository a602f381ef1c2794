-- What all scripts of limits share, behind `clock` and `stamp` (tasks/connection/redis_clock.py); contract/keys.py has the keys.
--   admissions  zset: id of a request → when it was let in. Its tokens are there as 'x' .. id, from when they were
--               charged. What it took beyond that, after those had left the window, is there as 'xx' .. id.
--   charges     hash: the same ids → tokens; and the sums over the window, 'requests' and 'tokens'
--   jobs        zset: a lease for each job of a request that runs → when it ends

local function lease_of(id, place)
  return id .. ':' .. place
end

local function requests_of(id)
  return string.sub(id, 1, 1) == 'x' and 0 or 1
end

-- Adds to what the window has. Both keys go together, after all in them has left the window.
local function charge(admissions, charges, id, now, window, tokens)
  redis.call('ZADD', admissions, stamp(now), id)
  redis.call('HSET', charges, id, tokens)
  redis.call('HINCRBY', charges, 'requests', requests_of(id))
  redis.call('HINCRBY', charges, 'tokens', tokens)
  redis.call('EXPIRE', admissions, 2 * window)
  redis.call('EXPIRE', charges, 2 * window)
end

-- Forgets what has left the window. Returns the requests and tokens that are in it.
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
    redis.call('HINCRBY', charges, 'requests', 0 - requests) -- no "-0", which is not an integer for Redis
    redis.call('HINCRBY', charges, 'tokens', 0 - tokens)
  end
  local sums = redis.call('HMGET', charges, 'requests', 'tokens')
  return tonumber(sums[1] or 0), tonumber(sums[2] or 0)
end
