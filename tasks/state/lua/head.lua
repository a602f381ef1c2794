-- The ids at the head of a list, up to the first one that no worker has had: from there on they stand in the order of
-- their submission. KEYS: list. ARGV: prefix of entries, most ids.
-- Returns the time of submission of that first one ('' if the list ended before, '-' if it was too far), then the ids.
local ids = {''}
for at = 1, tonumber(ARGV[2]) do
  local message = redis.call('LINDEX', KEYS[1], -at)
  if not message then return ids end
  local id = string.match(message, '"correlation_id": ?"([^"]+)"')
  if id then
    ids[#ids+1] = id
    local found = redis.call('HMGET', ARGV[1] .. id, 'submitted_at', 'returned')
    if found[1] and not found[2] then
      ids[1] = found[1]
      return ids
    end
  end
end
ids[1] = '-'
return ids
