-- Something is said of a model, an adapter or the default, unless something else was said since.
-- KEYS: record. ARGV: field, what stood there ('any' is not checked), the JSON after its time, the time that it must be
-- later than, most fields. Returns what stands there now, '' if the record is full.
local found = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[2] ~= 'any' and (found or '') ~= ARGV[2] then return found or '' end
if not found and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return '' end
local said = '{"at":' .. stamp(math.max(clock(), tonumber(ARGV[4]) + 1e-6)) .. (ARGV[3] == '}' and '' or ',') .. ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], said)
return said
