-- How many records a tenant has that have not expired, and how many bytes these have. What the index still has of records that are gone goes.
-- `index`: the tenant's; `prefix`: that of the records' keys.
local function used(index, prefix, now)
  local num, bytes = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    local found = redis.call('HMGET', prefix .. id, 'bytes', 'gone_at')
    if not found[1] then
      redis.call('ZREM', index, id)
    elseif tonumber(found[2]) > now then
      num, bytes = num + 1, bytes + tonumber(found[1])
    end
  end
  return num, bytes
end

