/* AMX: the kernel's permission to use tiles, their shapes, and the instructions as macros.
 *
 * Tiles hold up to 16 rows of 64 bytes. `TILE_DOT(c, a, b)` is c[m][n] += sum over pairs p of
 * a[m][2p] * b[p][2n] + a[m][2p + 1] * b[p][2n + 1], a and b bf16, c fp32: b holds pairs of
 * consecutive k side by side. Include only under `#ifdef __AMX_BF16__`. */
#pragma once
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_BYTES 1024

struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} __attribute__((aligned(64)));

/* Asks Linux for the tile state, for the whole process; whether it was granted. */
static inline int amx_permitted(void) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Loads a thread's tile shapes. The clobber: tile macros read memory the compiler has written. */
static inline void amx_load(const struct tile_shapes *shapes) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes) : "memory");
}

/* Eight tiles of 64-byte rows; tile i has rows[i] of them. */
static inline void amx_shape(const uint8_t rows[8]) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = rows[i], shapes.bytes[i] = 64;
    amx_load(&shapes);
}

/* Eight tiles of 16 rows. */
static inline void amx_full(void) {
    amx_shape((const uint8_t[8]){16, 16, 16, 16, 16, 16, 16, 16});
}

/* Gives the tiles back: context switches need not save them. */
static inline void amx_release(void) { __asm__ volatile("tilerelease" : : : "memory"); }

/* t: a tile number, written as a literal; stride: bytes from row to row. */
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t \
                     : : "r"((const void *)(at)), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" \
                     : : "r"((void *)(at)), "r"((long)(stride)) : "memory")
#define TILE_DOT(c, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
