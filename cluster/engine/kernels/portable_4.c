/* NEON on ARM; SSE2 on x86-64, where a fused product is a library call. */
#define WIDTH 4
#define TARGET
#include "portable.h"
