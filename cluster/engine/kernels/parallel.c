/*
 * A pool of threads for many short jobs: a layer has a dozen.
 *
 * Its caller never waits for a thread, only for items: one that lost its core to another process holds up what it
 * had begun and nothing else. (OpenMP's barrier waits for every thread of the team.)
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include <pthread.h>
#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

#define MAX_THREADS 256
#define POOL_NAME "outrider-pool" /* shown by top -H */
/* Long enough to bridge the gap between two operators, where a wake-up would cost more than the job; short enough
   that an engine that waits leaves its cores to others. About 50 ns each. */
#define SPINS_BEFORE_SLEEP 5000
#define SPINS_BEFORE_YIELD 20000
/* A handful of rows is done before another thread would wake up. */
#define MIN_FLOATS_TO_SHARE 65536

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

#ifdef __linux__
static void sleep_while(_Atomic uint32_t *number, uint32_t value) {
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static void wake_all(_Atomic uint32_t *number) { syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0); }
#else
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t waking = PTHREAD_COND_INITIALIZER;
static void sleep_while(_Atomic uint32_t *number, uint32_t value) {
    pthread_mutex_lock(&sleeping);
    if (atomic_load(number) == value) pthread_cond_wait(&waking, &sleeping);
    pthread_mutex_unlock(&sleeping);
}
static void wake_all(_Atomic uint32_t *number) {
    (void)number;
    pthread_mutex_lock(&sleeping);
    pthread_cond_broadcast(&waking);
    pthread_mutex_unlock(&sleeping);
}
#endif

/*
 * The ticket says which job is open and which of its items is next: (generation << 32) | item. Claiming an item
 * is one compare-and-swap, which fails if another job was opened meanwhile. A closed job's item is CLOSED, so
 * that no thread can claim from it with the fields of the next.
 */
#define CLOSED 0xffffffffu

static _Atomic uint64_t ticket = CLOSED;
static _Atomic uint32_t num_opened; /* sleepers wait for a change of it */
static _Atomic int num_sleeping;
static _Atomic int64_t num_done;
static struct {
    _Atomic(Task) task;
    _Atomic(const void *) job;
    _Atomic uint32_t count;
} open_job;

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
static int num_workers; /* guarded by in_use */
static _Atomic uint32_t num_wanted; /* of them, for the job; the others sleep until it changes */

/* Does items of the open job until none is left. */
static void work(void) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
        Task task = atomic_load_explicit(&open_job.task, memory_order_relaxed);
        const void *job = atomic_load_explicit(&open_job.job, memory_order_relaxed);
        uint32_t count = atomic_load_explicit(&open_job.count, memory_order_relaxed), item = (uint32_t)seen;
        if (item >= count) return;
        if (!atomic_compare_exchange_weak(&ticket, &seen, seen + 1)) continue;
        task(job, item);
        atomic_fetch_add_explicit(&num_done, 1, memory_order_release);
    }
}

static void *worker(void *number) {
    const uint32_t index = (uint32_t)(uintptr_t)number;
    uint32_t seen = 0, wanted;
#ifdef __linux__
    pthread_setname_np(pthread_self(), POOL_NAME);
#endif
    for (;;) {
        while (index >= (wanted = atomic_load_explicit(&num_wanted, memory_order_acquire))) {
            sleep_while(&num_wanted, wanted);
        }
        for (int spins = 0; atomic_load_explicit(&num_opened, memory_order_acquire) == seen; spins++) {
            if (spins < SPINS_BEFORE_SLEEP) {
                PAUSE();
                continue;
            }
            atomic_fetch_add(&num_sleeping, 1);
            sleep_while(&num_opened, seen);
            atomic_fetch_sub(&num_sleeping, 1);
            spins = 0;
        }
        seen = atomic_load_explicit(&num_opened, memory_order_acquire);
        if (index < atomic_load_explicit(&num_wanted, memory_order_acquire)) work();
    }
    return NULL;
}

static void start_workers(int wanted) {
    for (; num_workers < wanted; num_workers++) {
        pthread_t thread;
        /* fewer threads do the same work */
        if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)num_workers) != 0) return;
        pthread_detach(thread);
    }
}

static void want_workers(uint32_t wanted) {
    start_workers((int)wanted);
    if (atomic_load_explicit(&num_wanted, memory_order_relaxed) == wanted) return;
    atomic_store(&num_wanted, wanted);
    wake_all(&num_wanted);
}

void parallel_for(Task task, const void *job, int64_t count, int num_threads) {
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads <= 1 || count <= 1 || count >= CLOSED || pthread_mutex_trylock(&in_use) != 0) {
        for (int64_t i = 0; i < count; i++) task(job, i);
        return;
    }
    want_workers((uint32_t)num_threads - 1);
    uint64_t generation = (atomic_load_explicit(&ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&num_done, 0, memory_order_relaxed);
    atomic_store_explicit(&open_job.task, task, memory_order_release);
    atomic_store_explicit(&open_job.job, job, memory_order_release);
    atomic_store_explicit(&open_job.count, (uint32_t)count, memory_order_release);
    atomic_store(&ticket, generation << 32);
    atomic_fetch_add(&num_opened, 1);
    if (atomic_load(&num_sleeping) > 0) wake_all(&num_opened);
    work();
    for (int spins = 0; atomic_load_explicit(&num_done, memory_order_acquire) < count; spins++) {
        if (spins < SPINS_BEFORE_YIELD) PAUSE();
        else sched_yield();
    }
    atomic_store(&ticket, (generation << 32) | CLOSED);
    pthread_mutex_unlock(&in_use);
}

int useful_threads(int64_t num_rows, int64_t row_size, int num_threads) {
    return num_rows * row_size < MIN_FLOATS_TO_SHARE ? 1 : num_threads;
}

static int64_t first_of(const Shares *s, int64_t share) { return s->count * share / s->num_shares; }

void divide(Shares *s, int64_t count, int num_threads) {
    const int64_t most = count < MAX_SHARES ? count : MAX_SHARES;
    s->count = count;
    s->num_shares = num_threads < 1 ? 1 : num_threads < most ? num_threads : most;
    for (int64_t share = 0; share < s->num_shares; share++) atomic_init(&s->next[share], first_of(s, share));
}

int64_t next_of(Shares *s, int64_t share) {
    for (int64_t i = 0; i < s->num_shares; i++) {
        const int64_t of = (share + i) % s->num_shares;
        const int64_t item = atomic_fetch_add_explicit(&s->next[of], 1, memory_order_relaxed);
        if (item < first_of(s, of + 1)) return item;
    }
    return -1;
}
