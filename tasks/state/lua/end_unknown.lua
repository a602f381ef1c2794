-- Writes the last event of a job that has no entry, unless its journal has one.
-- KEYS: entry, journal. ARGV: field of an event, seconds to keep the journal, channel, the event's JSON after the `seq`.
-- Returns 1 if it was written.
local job, journal = unpack(KEYS)
local field, kept_s, channel, data = unpack(ARGV)
if redis.call('EXISTS', job) == 1 then return 0 end
local last, seq = redis.call('XREVRANGE', journal, '+', '-', 'COUNT', 1)[1], 0
if last then
  local kind = string.match(last[2][2], '^{"seq":%d+,"type":"(%a+)"')
  if kind == 'done' or kind == 'error' then return 0 end
  seq = tonumber(string.match(last[1], '^%d+')) -- entries are numbered from 1
end
local event = '{"seq":' .. seq .. ',' .. data
redis.call('XADD', journal, (seq + 1) .. '-0', field, event)
redis.call('EXPIRE', journal, kept_s)
redis.call('PUBLISH', channel, event)
announce_end(string.sub(journal, #JOURNAL + 1), event)
return 1
