-- Work of a step that the script does beside its tensors, and that a captured step must do again.
-- Invariant: outside of a recording `run` is a plain call.
-- To add such work: wrap it in host.run where it is written. Either kind is done anew. "feed": steps of
-- an optimizer over the same lists are replayed with the new numbers; "aside": its calls are not recorded.
local host = { recorder = nil }

--- f(...), kept by the recording that is made, if one is.
---@param kind "feed"|"aside"
---@param f fun(...): ...
---@return ... what f returns
function host.run(kind, f, ...)
  if host.recorder then return host.recorder(kind, f, ...) end
  return f(...)
end

return host
