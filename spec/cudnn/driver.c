/* driver.c: the calls by which cuDNN loads code that it has compiled, for a machine without a
 * driver: they say yes and load nothing. What else a driver has fails as in the toolkit's stub
 * (the Makefile lists its names). Nothing can run on it.
 * To add a call that cuDNN makes while it builds a plan: its function here.
 */
static int anything;

int cuLibraryLoadData(void **out) { return *out = &anything, 0; }
int cuLibraryUnload(void) { return 0; }
int cuLibraryGetKernel(void **out) { return *out = &anything, 0; }
int cuLibraryGetModule(void **out) { return *out = &anything, 0; }
int cuKernelGetFunction(void **out) { return *out = &anything, 0; }
int cuKernelSetAttribute(void) { return 0; }
int cuModuleLoadData(void **out) { return *out = &anything, 0; }
int cuModuleLoadDataEx(void **out) { return *out = &anything, 0; }
int cuModuleUnload(void) { return 0; }
int cuModuleGetFunction(void **out) { return *out = &anything, 0; }
int cuFuncSetAttribute(void) { return 0; }
