# Makefile: builds, installs and checks Orrery. `make help` lists the targets.
#
# Invariant: nothing outside build*/ and bin/ is written; a new .c file under csrc/ or kernels/ is
# picked up by its place alone. Core objects know no Lua version and are compiled once; csrc/lua_*.c
# is compiled per interpreter. To add a target: write it, name it in .PHONY, and describe it in `help`.

LUA      ?= luajit
PREFIX   ?= /usr/local
ARCH     ?= -march=native
BUILD    ?= build
SAN      ?=
CFLAGS   ?= -O2 -g
WERROR   ?=
DESTDIR  ?=
# Spec files (patterns without _spec.lua) that interpreters other than LuaJIT leave out of `make test`:
# slow ones, about the core rather than about Lua.
PUC_SKIP ?= op_matrix bench
# Spec files that the sanitizer builds run, and the interpreter that runs them. ThreadSanitizer leaves
# out what queues nothing.
SAN_SPEC ?= *
TSAN_SPEC ?= $(if $(filter-out file,$(origin SAN_SPEC)),$(SAN_SPEC),allocation_failure attention balance \
             batches behaviours_* c_api channels_last data embed engines examples memory op_matrix \
             optim_placed plan recurrent redistribute resolved tensor_plan training zero)
SAN_LUA  ?= lua5.1
SPEC     ?= *
FAKE_SPEC ?= op_matrix gpu_* plan sequence zero tensor_plan redistribute training attention pipeline \
             behaviours_*
# How many compilers `make demo` and `make test` run at once, where -j does not say.
JOBS     ?= $(shell nproc 2>/dev/null || echo 1)
SUBMAKE   = $(MAKE) -s --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS))

# ---- the interpreter --------------------------------------------------------------------------
LUA_NAME := $(notdir $(LUA))
ifneq ($(filter luajit%,$(LUA_NAME)),)
  LUA_ABI := 5.1
  LUA_PC  := luajit
  LUA_INC := $(firstword $(wildcard /usr/include/luajit-2.* /usr/local/include/luajit-2.*))
else
  LUA_ABI := $(or $(patsubst lua%,%,$(filter lua5.%,$(LUA_NAME))),\
                  $(shell $(LUA) -e 'io.write((_VERSION:gsub("Lua ", "")))' 2>/dev/null))
  LUA_PC  := lua$(LUA_ABI)
  LUA_INC := $(firstword $(wildcard /usr/include/lua$(LUA_ABI) /usr/local/include/lua$(LUA_ABI)))
endif
LUA_INCDIR ?= $(or $(LUA_INC),$(shell pkg-config --variable=includedir $(LUA_PC) 2>/dev/null))
LUA_LIBS   ?= $(or $(shell pkg-config --libs $(LUA_PC) 2>/dev/null),-l$(LUA_PC:luajit=luajit-5.1))

# ---- flags ------------------------------------------------------------------------------------
WARN    := -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wno-unknown-pragmas
OPENMP  := -fopenmp
DEFINES :=
LDSAN   :=
ifneq ($(SAN),)
  DEFINES += -DORR_TEST
  CFLAGS  := -O1 -g -fno-omit-frame-pointer -fsanitize=$(SAN)
  LDSAN   := -fsanitize=$(SAN)
  ifeq ($(SAN),address)
    CFLAGS += -fsanitize=undefined -fno-sanitize-recover=undefined
    LDSAN  += -fsanitize=undefined
  endif
  ifeq ($(SAN),thread)
    OPENMP :=
  endif
endif
ifneq ($(WERROR),)
  WARN += -Werror
endif
ifneq ($(FAKE),)
  DEFINES += -DORR_FAKE -DORR_CUDA_DRIVER='""'
endif
HAVE_DNNL := $(shell printf '\#include <dnnl.h>\n' | $(CC) $(CPPFLAGS) -E -xc - >/dev/null 2>&1 && echo 1)
ifneq ($(HAVE_DNNL),)
  DEFINES += -DORR_WITH_ONEDNN
endif
BASE     := -std=gnu11 -D_GNU_SOURCE $(CFLAGS) $(ARCH) -fPIC -pthread -fvisibility=hidden $(WARN) $(DEFINES)
CORE_INC := -I. -Icsrc -Ikernels
# The path of a small op crosses a dozen files of csrc: they are optimised as one where gcc can.
LTO :=
ifeq ($(SAN),)
  LTO := $(shell $(CC) --version 2>/dev/null | grep -qi 'free software' && echo -flto=auto -ffat-lto-objects)
endif
KERNEL_FLAGS := -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math $(OPENMP)
ifneq ($(SAN),)
  KERNEL_FLAGS := -ffp-contract=fast $(OPENMP)
endif
LIBS     := $(OPENMP) -pthread -ldl -lm

# ---- CUDA -------------------------------------------------------------------------------------
# The plug-in orrery/cuda.so is built where nvcc and the headers of cuDNN and NCCL are found. By
# default it holds code for sm_80, sm_90 and sm_100, as far as nvcc knows them, and PTX of the
# newest of these for what comes.
ifndef CUDA_HOME
  CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(firstword $(shell command -v nvcc 2>/dev/null) \
                 $(wildcard /usr/local/cuda/bin/nvcc))))
endif
NVCC     := $(wildcard $(CUDA_HOME)/bin/nvcc)
CUDA_INC ?= $(CUDA_HOME)/include
CUDA_LIB ?= $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib))
cuda_has  = $(wildcard $(CUDA_INC)/$(1) /usr/include/$(1) /usr/include/$(MULTIARCH)/$(1))
MULTIARCH := $(shell $(CC) -print-multiarch 2>/dev/null)
HAVE_CUDA := $(and $(NVCC),$(call cuda_has,cudnn.h),$(call cuda_has,nccl.h))
ifneq ($(HAVE_CUDA),)
  CUDA_KNOWN := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
  CUDA_ARCH  ?= $(filter $(CUDA_KNOWN),sm_80 sm_90 sm_100)
endif
CUDA_CODE   = $(foreach a,$(CUDA_ARCH:sm_%=%),-gencode=arch=compute_$a,code=sm_$a) \
              $(foreach a,$(patsubst sm_%,%,$(lastword $(CUDA_ARCH))),-gencode=arch=compute_$a,code=compute_$a)
comma      := ,
CUDA_FLAGS  = -std=c++17 -O3 -Xfatbin=-compress-all -I. -Ikernels $(CUDA_CODE) \
              -Xcompiler -fPIC$(comma)-fvisibility=hidden$(comma)-Wall$(comma)-Wextra
ifneq ($(FAKE),)
  # Fake runtimes in place of CUDA's: any driver will do, kernels are C++ (spec/fake).
  HAVE_CUDA  := 1
  CUDA_INC   := spec/fake/include
  NVCC       := $(CXX)
  FAKE_CPP   := $(filter-out spec/fake/check%,$(wildcard spec/fake/*.cpp))
  CUDA_FLAGS := -x c++ -std=c++17 -O1 -g -fPIC -fvisibility=hidden -DORR_FAKE -I. -Ikernels -I$(CUDA_INC) \
                -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -Wno-maybe-uninitialized $(if $(SAN),-fsanitize=$(SAN))
  ifneq ($(RACES),)
    # Kernels tell of every access, and a race between two lanes is their error (races.cpp).
    FAKE_CPP   += spec/fake/check/races.cpp
    CUDA_TELLS := -fsanitize=thread --param tsan-distinguish-volatile=1
  endif
endif
CUDA_LIBS  := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcublasLt -lcudnn -lnccl -lcudart_static -lstdc++ -pthread \
              -ldl -lrt -lm
ifneq ($(FAKE),)
  CUDA_LIBS := -lstdc++ -pthread -ldl -lm
endif

# ---- files ------------------------------------------------------------------------------------
# lua_open.c is the module file itself: it prepares the environment, then opens libcore.so beside it.
OPEN_C   := csrc/lua_open.c
LUA_C    := $(filter-out $(OPEN_C),$(wildcard csrc/lua_*.c))
CORE_C   := $(filter-out csrc/lua_%.c csrc/cuda%.c,$(wildcard csrc/*.c)) $(wildcard kernels/*.c)
OBJ      := $(BUILD)/obj
LOBJ     := $(BUILD)/$(LUA_NAME)
CORE_O   := $(CORE_C:%.c=$(OBJ)/%.o)
LUA_O    := $(LUA_C:%.c=$(LOBJ)/obj/%.o)
OPEN_O   := $(OPEN_C:%.c=$(LOBJ)/obj/%.o)
MODULE   := $(LOBJ)/orrery/core.so
ENGINE   := $(LOBJ)/orrery/libcore.so
EXAMPLES := $(patsubst examples/%.c,$(LOBJ)/examples/%,$(wildcard examples/*.c))
HEADER   := $(wildcard csrc/orrery.h)
CUDA_C   := $(wildcard csrc/cuda*.c)
CUDA_CU  := $(wildcard kernels/*.cu)
CUDA_O   := $(CUDA_C:%.c=$(OBJ)/cuda/%.o) $(CUDA_CU:%.cu=$(OBJ)/cuda/%.o) $(FAKE_CPP:%.cpp=$(OBJ)/cuda/%.o)
PLUGIN   := $(LOBJ)/orrery/cuda.so
# What the GPU bench holds Orrery against: copies and launches without it.
CONTROL  := $(BUILD)/gpu_control
CONTROL_O := $(OBJ)/cuda/bench/gpu_control.o $(FAKE_CPP:%.cpp=$(OBJ)/cuda/%.o)
# Another BUILD folder holds its own command.
COMMAND  := $(if $(filter build,$(BUILD)),bin/orrery,$(BUILD)/bin/orrery)
Q        := $(if $(V),,@)
say       = @printf '  %-4s %s\n' $(1) $(2)

.PHONY: all core cuda deps demo test lint format bench bench-deps install install-lua asan tsan fake gpu-kit env \
        examples libs clean help FORCE
.DEFAULT_GOAL := all

all: core $(COMMAND) $(if $(HAVE_CUDA),$(if $(SAN),,cuda))
core: $(MODULE) $(ENGINE)
ifneq ($(HAVE_CUDA),)
cuda: $(PLUGIN)
else
cuda:
	@echo "make cuda: needs nvcc (CUDA_HOME=/path/of/cuda), and the headers of cuDNN and NCCL" >&2; exit 1
endif
libs: $(BUILD)/liborrery.so $(LOBJ)/liborrery.a
examples: $(EXAMPLES)

# ---- compiling --------------------------------------------------------------------------------
# A stamp holds the command line, so that other flags rebuild and equal ones do not; the compiler
# stands there as the file it is, since cc and gcc are mostly one.
CC_FILE := $(shell readlink -f "$$(command -v $(firstword $(CC)))") $(wordlist 2,9,$(CC))
$(OBJ)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(LTO) $(KERNEL_FLAGS) $(OPENMP)' | cmp -s - $@ || \
	  echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(LTO) $(KERNEL_FLAGS) $(OPENMP)' > $@
$(LOBJ)/flags: FORCE
	@mkdir -p $(@D)
	@test -f '$(LUA_INCDIR)/lua.h' || { \
	  echo "no lua.h for $(LUA_NAME): run 'make deps', or give LUA_INCDIR=/path/of/headers" >&2; exit 1; }
	@echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(LTO) -I$(LUA_INCDIR)' | cmp -s - $@ || \
	  echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(LTO) -I$(LUA_INCDIR)' > $@

$(OBJ)/kernels/%.o: kernels/%.c $(OBJ)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(BASE) $(KERNEL_FLAGS) -Ikernels -MMD -MP -c $< -o $@
$(OBJ)/csrc/cpu%.o: csrc/cpu%.c $(OBJ)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(BASE) $(OPENMP) $(CORE_INC) -MMD -MP -c $< -o $@
$(OBJ)/csrc/%.o: csrc/%.c $(OBJ)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(BASE) $(LTO) $(CORE_INC) -MMD -MP -c $< -o $@
$(LOBJ)/obj/csrc/lua_%.o: csrc/lua_%.c $(LOBJ)/flags
	@mkdir -p $(@D)
	$(call say,CC,"$< ($(LUA_NAME))")
	$(Q)$(CC) $(CPPFLAGS) $(BASE) $(LTO) $(CORE_INC) -I$(LUA_INCDIR) -MMD -MP -c $< -o $@

$(OBJ)/cuda/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(NVCC) $(CUDA_FLAGS) $(CUDA_TELLS)' | cmp -s - $@ || \
	  echo '$(CC_FILE) $(CPPFLAGS) $(BASE) $(NVCC) $(CUDA_FLAGS) $(CUDA_TELLS)' > $@
$(OBJ)/cuda/csrc/%.o: csrc/%.c $(OBJ)/cuda/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(BASE) $(CORE_INC) -isystem $(CUDA_INC) -MMD -MP -c $< -o $@
$(OBJ)/cuda/kernels/%.o: kernels/%.cu $(OBJ)/cuda/flags
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$(Q)$(NVCC) $(CUDA_FLAGS) $(CUDA_TELLS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/cuda/bench/%.o: bench/%.cu $(OBJ)/cuda/flags
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$(Q)$(NVCC) $(CUDA_FLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(OBJ)/cuda/spec/fake/%.o: spec/fake/%.cpp $(OBJ)/cuda/flags
	@mkdir -p $(@D)
	$(call say,CXX,$<)
	$(Q)$(CXX) $(CUDA_FLAGS) -O2 -Ispec/fake -MMD -MP -MF $(@:.o=.d) -c $< -o $@

# ---- linking ----------------------------------------------------------------------------------
$(ENGINE): $(CORE_O) $(LUA_O)
	@mkdir -p $(@D)
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(CFLAGS) $(ARCH) $(LTO) $(LDSAN) $(LDFLAGS) -o $@ $^ $(LIBS)
$(MODULE): $(OPEN_O)
	@mkdir -p $(@D)
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(LDSAN) $(LDFLAGS) -o $@ $^ -ldl
$(BUILD)/liborrery.so: $(CORE_O)
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(LDSAN) $(LDFLAGS) -Wl,-soname,liborrery.so -o $@ $^ $(LIBS)
# The archive holds the Lua module too; a host that uses no Lua pulls none of it in.
$(LOBJ)/liborrery.a: $(CORE_O) $(LUA_O)
	$(call say,AR,$@)
	$(Q)rm -f $@ && $(AR) rcs $@ $^
$(LOBJ)/examples/%: examples/%.c $(LOBJ)/liborrery.a $(LOBJ)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(BASE) -Icsrc -I$(LUA_INCDIR) $(LDSAN) $(LDFLAGS) -MMD -MP $< -o $@ \
	  $(LOBJ)/liborrery.a $(LUA_LIBS) $(LIBS)

$(PLUGIN): $(CUDA_O)
	@mkdir -p $(@D)
	$(call say,LD,$@)
	$(Q)$(CC) -shared $(LDFLAGS) -o $@ $^ $(CUDA_LIBS) -Wl,--exclude-libs,ALL -Wl,-z,defs

$(CONTROL): $(CONTROL_O)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $^ $(if $(FAKE),,-L$(CUDA_LIB) -lcudart_static) -lstdc++ -pthread -ldl -lrt -lm

# launcher(lua directory, module directory, interpreters): both directories relative to bin's parent.
launcher = sed -e 's|@LUADIR@|$(1)|; s|@LIBDIR@|$(2)|; s|@LUAS@|$(3)|' tools/orrery.in
$(COMMAND): tools/orrery.in FORCE
	@mkdir -p $(@D)
	@$(call launcher,$(if $(filter build,$(BUILD)),lua,$(CURDIR)/lua),$(if \
	  $(filter build,$(BUILD)),$(BUILD),$(abspath $(BUILD)))/@NAME@,$(LUA)) > $@.$$$$ && \
	  chmod 755 $@.$$$$ && if cmp -s $@.$$$$ $@; then rm -f $@.$$$$; else mv -f $@.$$$$ $@; fi

-include $(CORE_O:.o=.d) $(CUDA_O:.o=.d) $(CONTROL_O:.o=.d) $(LUA_O:.o=.d) $(OPEN_O:.o=.d) $(EXAMPLES:=.d)

# ---- installing -------------------------------------------------------------------------------
# LuaRocks gives LUADIR, LIBDIR and BINDIR; its tree keeps them as PREFIX/share, lib and bin too.
LUADIR  ?= $(PREFIX)/share/lua/$(LUA_ABI)
LIBDIR  ?= $(PREFIX)/lib/lua/$(LUA_ABI)
BINDIR  ?= $(PREFIX)/bin
# The command tries these in turn; a rock for the 5.1 interface prefers LuaJIT where there is one.
LAUNCH  ?= $(if $(ROCK),$(if $(filter 5.1,$(LUA_ABI)),luajit )$(LUA_NAME),$(LUA))

install-lua: core
	$(call say,CP,"$(DESTDIR)$(LUADIR) $(DESTDIR)$(LIBDIR) $(DESTDIR)$(BINDIR)")
	@cd lua && find orrery -name '*.lua' | while read -r file; do \
	  install -D -m 644 "$$file" "$(DESTDIR)$(LUADIR)/$$file" || exit 1; done
	@install -s -D -m 755 $(MODULE) "$(DESTDIR)$(LIBDIR)/orrery/core.so"
	@install -s -D -m 755 $(ENGINE) "$(DESTDIR)$(LIBDIR)/orrery/libcore.so"
	@test ! -f $(PLUGIN) || install -s -D -m 755 $(PLUGIN) "$(DESTDIR)$(LIBDIR)/orrery/cuda.so"
	@mkdir -p "$(DESTDIR)$(BINDIR)"
	@$(call launcher,share/lua/$(LUA_ABI),lib/lua/$(LUA_ABI),$(LAUNCH)) > "$(DESTDIR)$(BINDIR)/orrery"
	@chmod 755 "$(DESTDIR)$(BINDIR)/orrery"
install: install-lua libs
	@install -s -D -m 755 $(BUILD)/liborrery.so "$(DESTDIR)$(PREFIX)/lib/liborrery.so"
	@install -D -m 644 $(LOBJ)/liborrery.a "$(DESTDIR)$(PREFIX)/lib/liborrery.a"
	@strip --strip-debug -R '.gnu.lto_*' -R '.gnu.debuglto_*' "$(DESTDIR)$(PREFIX)/lib/liborrery.a"
	@for h in $(HEADER); do install -D -m 644 $$h "$(DESTDIR)$(PREFIX)/include/orrery.h" || exit 1; done

# ---- running ----------------------------------------------------------------------------------
deps:
	@sh tools/deps.sh all
demo:
	@sh tools/deps.sh --check demo
	@+$(SUBMAKE) all
	@$(COMMAND) examples/digits.lua --plan "data<0,1>" --net cnn
test:
	@sh tools/deps.sh --check test
	@+$(SUBMAKE) core libs examples
	@+test -x $(COMMAND) || $(MAKE) -s --no-print-directory $(COMMAND)
	@COMMAND='$(abspath $(COMMAND))' BUILD='$(BUILD)' PUC_SKIP='$(if $(filter luajit%,$(LUA_NAME)),,$(PUC_SKIP))' \
	  $(LUA) tools/test.lua '$(LUA)' '$(SPEC)'
lint:
	@sh tools/deps.sh --check lint
	@+$(SUBMAKE) core || true
	@BUILD='$(BUILD)' LUA='$(LUA)' LUA_INCDIR='$(LUA_INCDIR)' DEFINES='$(DEFINES)' sh tools/lint.sh
format:
	@find csrc kernels examples -name '*.[ch]' | xargs clang-format -i
# DEVICES=cuda: the GPU's, in BUILD/bench-gpu; BENCH holds more arguments.
bench: all $(if $(filter cuda,$(DEVICES)),$(CONTROL))
	@eval "$$($(MAKE) -s --no-print-directory env)" && $(if $(filter cuda,$(DEVICES)), \
	  ORRERY_GPU_CONTROL='$(abspath $(CONTROL))' $(LUA) bench/gpu.lua --out '$(BUILD)/bench-gpu', \
	  $(LUA) bench/run.lua) $(BENCH)
bench-deps:
	@sh bench/deps.sh
asan:
	@+LUA='$(SAN_LUA)' SPEC='$(SAN_SPEC)' MAKE='$(MAKE)' sh tools/sanitize.sh address build-asan
tsan:
	@+LUA='$(SAN_LUA)' SPEC='$(TSAN_SPEC)' MAKE='$(MAKE)' sh tools/sanitize.sh thread build-tsan
# On fake GPUs: the specs that name no kind of device, then the plug-in's own.
fake:
	@sh tools/deps.sh --check fake
	@+$(SUBMAKE) FAKE=1 BUILD=$(BUILD)/fake core cuda $(BUILD)/fake/bin/orrery $(BUILD)/fake/gpu_control
	@+$(SUBMAKE) -C spec/fake/check BUILD=$(abspath $(BUILD))/fake/check
	@sh tools/fake.sh '$(LUA)' '$(BUILD)/fake' '$(FAKE_SPEC)'
# For GPUs of KIT_ARCH and newer ones: machine code of every kind would weigh more than the kit may; for
# another machine's processor, so it has a build folder of its own.
KIT_ARCH  ?= sm_90
KIT_CPU   ?= -march=x86-64-v3
KIT_BUILD ?= $(BUILD)/kit
gpu-kit:
	@+$(SUBMAKE) BUILD='$(KIT_BUILD)' ARCH='$(KIT_CPU)' CUDA_ARCH='$(KIT_ARCH)' all '$(KIT_BUILD)/gpu_control'
	@sh tools/gpu_kit.sh '$(LUA)' '$(KIT_BUILD)' '$(BUILD)/gpu-kit'
env:
	@echo "export LUA_PATH='$(CURDIR)/lua/?.lua;$(CURDIR)/lua/?/init.lua;;'"
	@echo "export LUA_CPATH='$(abspath $(LOBJ))/?.so;;'"
	@echo "export PATH='$(abspath $(dir $(COMMAND)))':\"\$$PATH\""
clean:
	rm -rf build build-asan build-tsan bin/orrery
help:
	@echo 'make [all]      build the module for LUA and the command bin/orrery'
	@echo 'make cuda       build the plug-in for NVIDIA GPUs (part of all where nvcc is found)'
	@echo 'make deps       install every missing package (Debian: apt-get, as root or by sudo)'
	@echo 'make demo       install what is missing, build, train the digits CNN on two devices'
	@echo 'make test       run every spec; SPEC=pattern picks, as in SPEC="op*"'
	@echo 'make lint       formatting, clang-tidy, luacheck, layers; `make format` formats the C files'
	@echo 'make bench      ratios to PyTorch (DEVICES=cuda: on a GPU); `make bench-deps` fetches PyTorch'
	@echo 'make install    into PREFIX (the module, the command, liborrery, orrery.h)'
	@echo 'make asan tsan  the specs under AddressSanitizer (and UBSan), under ThreadSanitizer'
	@echo 'make fake       the specs on fake GPUs: CUDA, cuBLASLt, cuDNN and NCCL as small fakes, no GPU needed'
	@echo 'make gpu-kit    build/gpu-kit: all that a bare machine with CUDA needs to run the GPU specs'
	@echo 'make env        exports for plain Lua: eval "$$(make -s env)"'
	@echo 'make clean      remove what was built'
	@echo 'variables: LUA=luajit|lua5.1|lua5.3|lua5.4 LUA_INCDIR PREFIX CC CFLAGS ARCH WERROR=1 V=1 CUDA_HOME CUDA_ARCH="sm_80 sm_90"'
