/* Selects the kernels that this processor supports. */
#include "instruction_sets.h"

const Portable *portable;

#if defined(__x86_64__)

#ifdef __linux__
#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Of Linux's <asm/prctl.h>, which the headers of older systems lack. */
#define REQUEST_PERMISSION 0x1023
#define TILE_DATA 18

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

#ifdef __linux__
static int has_permission;

/* The kernel keeps no room for a thread's tiles unless its process asks for it; threads and children inherit it. */
static void ask_permission(void) { has_permission = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }

static int has_tiles(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx_bf16) == 0 || (d & amx_tile) == 0) return 0;
    pthread_once(&once, ask_permission);
    return has_permission;
}
#else
static int has_tiles(void) { return 0; } /* other systems were not tried */
#endif

static const Portable *with_lanes(int64_t lanes) {
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (lanes == 4) return &portable_4; /* SSE2: the same bits, but slow, as a fused product is a library call; for tests */
    if (has_avx512() && lanes != 8) return lanes == 16 || lanes == 0 ? &portable_16 : NULL;
    return has_avx2 && (lanes == 8 || lanes == 0) ? &portable_8 : NULL;
}

int is_supported(InstructionSet set) {
    switch (set) {
        case PORTABLE: return portable != NULL;
        case AVX512_BF16: return has_avx512() && KNOWS_AVX512_BF16 && __builtin_cpu_supports("avx512bf16");
        case AMX: return has_avx512() && KNOWS_AMX && has_tiles();
        case AMX_EMULATED: return has_avx512();
    }
    return 0;
}

#else

static const Portable *with_lanes(int64_t lanes) {
#if defined(__aarch64__)
    if (lanes == 4 || lanes == 0) return &portable_4;
#endif
    (void)lanes;
    return NULL;
}

int is_supported(InstructionSet set) { return set == PORTABLE && portable != NULL; }

#endif

int use_lanes(int64_t lanes) {
    const Portable *found = with_lanes(lanes);
    if (found == NULL) return -1;
    portable = found;
    return 0;
}
