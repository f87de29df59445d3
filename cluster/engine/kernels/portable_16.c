#if defined(__x86_64__)
#define WIDTH 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "portable.h"
#endif
