/* What products may use here. */
#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "linear.h"

/* Of Linux's <asm/prctl.h>, which the headers of older systems lack. */
#define REQUEST_PERMISSION 0x1023
#define TILE_DATA 18

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

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

int is_supported(InstructionSet set) {
    if (!has_avx512()) return 0;
    switch (set) {
        case AVX512: return 1;
        case AVX512_BF16: return KNOWS_AVX512_BF16 && __builtin_cpu_supports("avx512bf16");
        case AMX: return KNOWS_AMX && has_tiles();
        case AMX_EMULATED: return 1;
    }
    return 0;
}
