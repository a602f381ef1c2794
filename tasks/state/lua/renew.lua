-- Renews leases of messages.
-- KEYS: entries. ARGV: lease in seconds, then id and token of taking for each entry.
-- Returns the indices, from 0, of the messages that another worker or none holds by now.
local ends_at, lost = stamp(clock() + tonumber(ARGV[1])), {}
for i, job in ipairs(KEYS) do
  local id, token = unpack(ARGV, 2 * i, 2 * i + 1)
  local holder, state = unpack(redis.call('HMGET', job, 'holder', 'state'), 1, 2)
  if holder == token then
    redis.call('ZADD', LEASES, ends_at, id)
  elseif state ~= 'done' then
    lost[#lost+1] = i - 1
  end
end
return lost
