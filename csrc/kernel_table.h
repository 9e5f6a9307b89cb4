/* kernel_table.h: what a kind of device computes with: one function pointer a row of
 * kernel_table.def.
 *
 * Invariant: `run` of an op calls kernels through its work's table and looks at no element
 * itself, so that it is written once for all kinds of device. Views hold that device's
 * pointers; on an asynchronous device a function only issues to the stream that is entered.
 * To add a kernel: a row in kernel_table.def, and its function for each kind of device.
 */
#ifndef ORR_KERNEL_TABLE_H
#define ORR_KERNEL_TABLE_H

#include "../kernels/attention.h"
#include "../kernels/conv.h"
#include "../kernels/copy.h"
#include "../kernels/elementwise.h"
#include "../kernels/index.h"
#include "../kernels/loss.h"
#include "../kernels/norm.h"
#include "../kernels/optim.h"
#include "../kernels/pool.h"
#include "../kernels/random.h"
#include "../kernels/reduce.h"
#include "../kernels/softmax.h"
#include "err.h"

typedef struct orr_kernels {
#define ORR_KERNEL(result, name, parameters) result(*name) parameters;
#include "kernel_table.def"
} orr_kernels;

extern const orr_kernels orr_kernels_cpu; /* cpu_kernels.c */

#endif
