--- The `orrery` command.
-- Invariant: a user's mistake ends with a message on standard error and a status (1: the script
-- failed, 2: the command line is wrong); only `cli.main` leaves the process.
-- To add a command: a row in `commands` and a line in `help`.
local repl = require "orrery.repl"
local syntax = require "orrery.syntax"
local terminal = require "orrery.terminal"
local traceback = require "orrery.traceback"

local cli = {}

local unpack = table.unpack or unpack

local help = [=[
usage: orrery [options] [script.lua [arguments]]
  orrery                     an interactive session
  orrery script.lua ...      runs a script; its arguments are in `arg` and `...`
  orrery -                   runs standard input
  orrery -e CODE             runs CODE, then the script if one follows
  orrery devices             lists the devices
  orrery devices --topology  how the CUDA devices reach each other, and how fast
  orrery selftest            checks that all devices compute the same and can copy to each other
  orrery --version           prints the version
  orrery --help              prints this
Scripts may use the literal form of a plan: net = parallel.data<0,1>(net)
]=]

local function version()
  local orrery = require "orrery"
  local jit = rawget(_G, "jit")
  return ("Orrery %s (%s)"):format(orrery._VERSION or "of unknown version", jit and jit.version or _VERSION)
end

local function complain(message)
  io.stderr:write("orrery: ", message, "\n")
end

--- Runs a function; a failure is told with the user's lines, and gives status 1.
local function attempt(f, ...)
  local line = terminal.line()
  if line then line.interrupt_install() end
  local ok, trace = traceback.call(f, ...)
  if ok then return 0 end
  complain(trace)
  return 1
end

local function run_chunk(chunk, message, arguments)
  if not chunk then
    complain(message)
    return 1
  end
  return attempt(chunk, unpack(arguments))
end

--- Runs a script ("-" is standard input) with `arg` set as Lua's own command does.
local function run_script(args, first, program)
  local script, arguments = args[first], { unpack(args, first + 1) }
  local global = { [0] = script, [-1] = program, unpack(arguments) }
  rawset(_G, "arg", global)
  if script == "-" then
    local chunk, message = syntax.load(io.read("*a"), "=stdin")
    return run_chunk(chunk, message, arguments)
  end
  local chunk, message = syntax.loadfile(script)
  return run_chunk(chunk, message, arguments)
end

local function run_code(code)
  local ok, env = traceback.call(repl.session)
  if not ok then
    complain(env)
    return 1
  end
  local chunk, reason = syntax.load(code, "=(command line)", "t", env)
  return run_chunk(chunk, reason, {})
end

local commands = {}

function commands.devices(option)
  local orrery = require "orrery"
  io.stdout:write(tostring(option and orrery.topology(true) or orrery.devices()), "\n")
end

function commands.selftest()
  local report = require("orrery").parallel.selftest()
  if report ~= nil and report ~= true then io.stdout:write(tostring(report), "\n") end
end

local options = {}

options["--version"] = function() io.stdout:write(version(), "\n") end
options["-v"] = options["--version"]
options["--help"] = function() io.stdout:write(help) end
options["-h"] = options["--help"]

local function wrong(message)
  complain(message .. "\ntry orrery --help")
  return 2
end

--- Runs the command line.
---@param args table arguments from 1; [0] the command's own name
---@return integer status 0 well, 1 the script failed, 2 the command line is wrong
function cli.run(args)
  local i, ran = 1, false
  while args[i] do
    local word = args[i]
    if word == "-e" then
      if not args[i + 1] then return wrong("-e needs the code to run") end
      local status = run_code(args[i + 1])
      if status ~= 0 then return status end
      i, ran = i + 2, true
    elseif word == "--" then
      i = i + 1
      break
    elseif options[word] then
      return attempt(options[word])
    elseif word ~= "-" and word:sub(1, 1) == "-" then
      return wrong(("unknown option '%s'"):format(word))
    elseif commands[word] and not ran then
      local option = args[i + 1]
      if option and not (word == "devices" and option == "--topology") then
        return wrong(("'%s' does not take '%s'"):format(word, option))
      end
      return attempt(commands[word], option)
    else
      break
    end
  end
  if args[i] then return run_script(args, i, args[0]) end
  if ran then return 0 end
  return attempt(function() repl.main(version() .. "; Ctrl-D ends the session") end)
end

--- Runs the command line and leaves the process when that failed.
---@param args table
function cli.main(args)
  local status = cli.run(args)
  if status ~= 0 then os.exit(status, true) end
end

return cli
