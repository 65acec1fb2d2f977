/* A round of a decode's online softmax. */
#pragma once
#include "common.h"

#define ROUND 32 /* tokens */

/* Where a round's tokens lie; places beyond `count` repeat the last. */
struct round { const bf16 *at[ROUND]; int count; };
