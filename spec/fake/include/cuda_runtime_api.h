/* cuda_runtime_api.h: as cuda_runtime.h, for C. */
#include "cuda_runtime.h"
