-- Replaces a field of a hash, unless it has changed.
-- KEYS: hash. ARGV: field, its value before or '', its new value. Returns 0 if it has changed.
local hash = KEYS[1]
local field, before, value = unpack(ARGV)
if (redis.call('HGET', hash, field) or '') ~= before then return 0 end
redis.call('HSET', hash, field, value)
return 1
