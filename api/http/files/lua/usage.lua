-- Returns the number of a tenant's records that have not expired, and their bytes. Removes deleted records from the index.
-- `index`: the tenant's index; `prefix`: that of the records' keys.
local function usage(index, prefix, now)
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

