-- Leases go on. KEYS: entries. ARGV: lease in seconds, then id and token of taking for each.
-- Returns the places of messages that another one holds by now, or none.
local ends_at, lost = stamp(clock() + tonumber(ARGV[1])), {}
for i, job in ipairs(KEYS) do
  local found = redis.call('HMGET', job, 'holder', 'state')
  if found[1] == ARGV[2*i+1] then
    redis.call('ZADD', LEASES, ends_at, ARGV[2*i])
  elseif found[2] ~= 'done' then
    lost[#lost+1] = i - 1
  end
end
return lost
