/* cudnn_flow.h: graphs of the fake cuDNN that are products, elementwise steps, reductions and
 * views, one after another (cudnn_flow.cpp).
 */
#ifndef ORR_FAKE_CUDNN_FLOW_H
#define ORR_FAKE_CUDNN_FLOW_H

#include <functional>

#include "cudnn_part.h"

/* Whether an engine takes such a graph. */
bool orr_fake_dnn_flow_fits(const std::vector<orr_fake_dnn_parts::Part *> &ops);
/* The work of it, for a stream; its results are off by `spoil`. Empty: something is not there
 * or does not fit, which is complained of. */
std::function<void()> orr_fake_dnn_flow(const std::vector<orr_fake_dnn_parts::Part *> &ops,
                                        const orr_fake_dnn_parts::Part *pack, int device,
                                        double spoil);

#endif
