-- The last event of a job that has no entry, unless its journal has one.
-- KEYS: entry, journal. ARGV: field, time of life of the journal, channel, the event's JSON after the `seq`. Returns 1 if written.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local last, seq = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1], 0
if last then
  local kind = string.match(last[2][2], '^{"seq":%d+,"type":"(%a+)"')
  if kind == 'done' or kind == 'error' then return 0 end
  seq = tonumber(string.match(last[1], '^%d+')) -- entries are numbered from 1
end
local event = '{"seq":' .. seq .. ',' .. ARGV[4]
redis.call('XADD', KEYS[2], (seq + 1) .. '-0', ARGV[1], event)
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], event)
tell_heeded(string.sub(KEYS[2], #JOURNAL + 1), event)
return 1
