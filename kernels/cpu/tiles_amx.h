/* Tiles on AMX: the kernel's permission to use them, their shapes, and the instructions as macros;
 * see tiles.h. */
#pragma once
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} __attribute__((aligned(64)));

#ifdef EMULATED_TILES
#include "tiles_emulated.h"
#else
/* Asks Linux for the tile state, for the whole process; whether it was granted. */
static inline int tiles_permitted(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Loads a thread's tile shapes. The clobber: tile macros read memory the compiler has written. */
static inline void load_shapes(const struct tile_shapes *shapes) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes) : "memory");
}

/* Gives the tiles back: context switches need not save them. */
static inline void tiles_release(void) { __asm__ volatile("tilerelease" : : : "memory"); }

/* t: a tile number, written as a literal; stride: bytes from row to row. */
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t \
                     : : "r"((const void *)(at)), "r"((long)(stride)) : "memory")
#define TILE_SUMS(t, at, stride) TILE_LOAD(t, at, stride)
/* What is read once: not to stay in the nearest cache. */
#define TILE_STREAM(t, at, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t \
                     : : "r"((const void *)(at)), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" \
                     : : "r"((void *)(at)), "r"((long)(stride)) : "memory")
#define TILE_DOT(c, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#endif

/* Eight tiles of 64-byte rows; tile i has rows[i] of them. */
static inline void tiles_shape(const uint8_t rows[8]) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = rows[i], shapes.bytes[i] = 64;
    load_shapes(&shapes);
}
