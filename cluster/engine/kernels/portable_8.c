#if defined(__x86_64__)
#define WIDTH 8
#define TARGET __attribute__((target("avx2,fma")))
#include "portable.h"
#endif
