"""Part of a round's kernel: the decoder layer, over new rows or the nodes of a depth.

Runs within ``source``'s loop over levels, uses what that declares, and ends the loop and the kernel.
"""

EXPAND = """
    // Queries, keys and values, from the embedding by one half of the warps and from the parent's state by the other.
    const int reads = level < 0 ? fresh_rows : WIDTH;
    float* joint = level < 0 ? new_joint : joints + level * WIDTH * JOINT;
    for (int tile = blockIdx.x; tile < JOINT / 16; tile += BLOCKS) {
      const bool embeds = warp < WARPS / 2;
      for (int t = 0; t < TILES; ++t) {
        const int row = t * 8 + group;
        rows[t] = row >= reads ? nullptr
            : embeds           ? embedding + static_cast<size_t>(tokens[row]) * H
                               : states + parents[row] * H;
      }
      const T* matrix = embeds ? by_embedding : by_state;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, H, rows, embeds ? embedding_norm : state_norm, warp % (WARPS / 2), WARPS / 2, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < reads * 16; element += THREADS) {
        const int row = element / 16, output = element % 16;
        const float inverse = inverse_of(WARPS / 2, WARPS, row);
        joint[row * JOINT + tile * 16 + output] = total_of(0, 0, WARPS / 2, row, output) *
                inverse_of(0, WARPS / 2, row) + total_of(0, WARPS / 2, WARPS, row, output) * inverse;
        if (tile == 0 && output == 0) inverses[row] = inverse;
      }
      __syncthreads();
    }
    if (!meet()) return;

    // Attention over the true rows, the node's ancestors and itself: see kernels.tree_attention. Of the new rows only
    // the newest hands anything on.
    const int expands = level < 0 ? 1 : WIDTH, first_row = level < 0 ? fresh_rows - 1 : 0;
    constexpr int PIECE = 16 / sizeof(T), LANES = D / PIECE, GROUPS = THREADS / LANES, HALF = D / 2;
    const int member = threadIdx.x % LANES, keeper = threadIdx.x / LANES, at = member * PIECE;
    const int capacity = keys_shape[2];
    const int position = length + fresh_rows + level;  // a row sits one before its token
    auto rotate = [&](const float* from, int position, float* piece) {
      const float* angles = rotations + static_cast<size_t>(position) * D + (at < HALF ? at : at - HALF);
      for (int i = 0; i < PIECE; ++i) {
        const float other = from[at < HALF ? at + HALF + i : at - HALF + i];
        piece[i] = from[at + i] * angles[i] + (at < HALF ? -other : other) * angles[HALF + i];
      }
    };
    if (level < 0) {
      for (int item = blockIdx.x * GROUPS + keeper; item < fresh_rows * KV_HEADS; item += BLOCKS * GROUPS) {
        const int row = item / KV_HEADS, kv_head = item % KV_HEADS;
        const float* own = new_joint + row * JOINT;
        float key[PIECE];
        rotate(own + (HEADS + kv_head) * D, length + row, key);
        T* to = fresh + (kv_head * NEW + row) * D + at;
        for (int i = 0; i < PIECE; ++i) {
          to[i] = static_cast<T>(key[i]);
          to[KV_HEADS * NEW * D + i] = static_cast<T>(own[(HEADS + KV_HEADS + kv_head) * D + at + i]);
        }
      }
      if (blockIdx.x == 0 && threadIdx.x <= NEW) {
        commit[threadIdx.x] = threadIdx.x == 0 ? start : threadIdx.x <= fresh_rows ? threadIdx.x - 1 : -1;
      }
    }
    for (int item = blockIdx.x; item < expands * HEADS; item += BLOCKS) {
      const int row = item / HEADS, head_at = item % HEADS, kv_head = head_at / (HEADS / KV_HEADS);
      auto unpack = [](uint4 bytes, float* piece) {
        const T* narrow = reinterpret_cast<const T*>(&bytes);
        for (int i = 0; i < PIECE; ++i) piece[i] = static_cast<float>(narrow[i]);
      };
      float query[PIECE], key[PIECE], value[PIECE], out[PIECE] = {};
      float peak = lowest, total = 0.0f;
      rotate(joint + (first_row + row) * JOINT + head_at * D, position, query);
      for (int i = 0; i < PIECE; ++i) query[i] *= ATTENTION_SCALE;
      auto take = [&](bool seen) {
        float score = 0.0f;
        for (int i = 0; i < PIECE; ++i) score += query[i] * key[i];
        for (int offset = LANES / 2; offset; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
        if (!seen) return;
        const float next = fmaxf(peak, score);
        const float keep = expf(peak - next), weight = expf(score - next);
        for (int i = 0; i < PIECE; ++i) out[i] = out[i] * keep + weight * value[i];
        total = total * keep + weight;
        peak = next;
      };
      constexpr int AHEAD = 4;  // keys under way at once
      for (int first = keeper; first - keeper < start; first += GROUPS * AHEAD) {
        uint4 key_bytes[AHEAD], value_bytes[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int slot = min(first + i * GROUPS, start - 1);
          key_bytes[i] = *reinterpret_cast<const uint4*>(keys + (kv_head * capacity + slot) * D + at);
          value_bytes[i] = *reinterpret_cast<const uint4*>(values + (kv_head * capacity + slot) * D + at);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int slot = first + i * GROUPS, held = slot < SINKS ? slot : slot + dropped;
          unpack(key_bytes[i], key);
          unpack(value_bytes[i], value);
          take(slot < start && (held < SINKS || position - held < window));
        }
      }
      // New rows up to this one, then the node's ancestors, itself last.
      const int others = fresh_rows + level + 1;
      for (int first = keeper; first - keeper < others; first += GROUPS) {
        const int depth = first - fresh_rows;
        const float* own = joint + (first_row + row) * JOINT;  // what is beyond looks at itself, unseen
        if (depth < 0) {
          own = new_joint + first * JOINT;
        } else if (first < others) {
          int node = row;
          for (int up = level; up > depth; --up) node = all_parents[up * WIDTH + node];
          own = joints + (depth * WIDTH + node) * JOINT;
        }
        const bool near = depth >= 0 || length + first < SINKS || position - length - first < window;
        const int from = min(length + first, position);
        rotate(own + (HEADS + kv_head) * D, from, key);
        for (int i = 0; i < PIECE; ++i) value[i] = own[(HEADS + KV_HEADS + kv_head) * D + at + i];
        take(first < others && near);
      }

      float *outs = partial, *peaks = energy, *weights = energy + GROUPS;
      if (member == 0) peaks[keeper] = peak;
      __syncthreads();
      float highest = lowest;
      for (int other = 0; other < GROUPS; ++other) highest = fmaxf(highest, peaks[other]);
      const float keep = peak == lowest ? 0.0f : expf(peak - highest);
      if (member == 0) weights[keeper] = total * keep;
      for (int i = 0; i < PIECE; ++i) outs[keeper * D + at + i] = out[i] * keep;
      __syncthreads();
      for (int dim = threadIdx.x; dim < D; dim += THREADS) {
        float sum = 0.0f, weight = 0.0f;
        for (int other = 0; other < GROUPS; ++other) {
          sum += outs[other * D + dim];
          weight += weights[other];
        }
        attended[row * QUERIES + head_at * D + dim] = static_cast<T>(sum / weight);
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < H / 16; tile += BLOCKS) {
      point_at(attended, QUERIES, expands);
      const T* matrix = output_weight;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, QUERIES, rows, static_cast<const T*>(nullptr), warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, column = tile * 16 + element % 16;
        float residual = static_cast<float>(states[parents[first_row + row] * H + column]);
        if (NORM_RESIDUAL) residual *= inverses[first_row + row] * static_cast<float>(state_norm[column]);
        middle[row * H + column] = static_cast<T>(residual + total_of(0, 0, WARPS, row, element % 16));
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < INNER / 16; tile += BLOCKS) {
      point_at(middle, H, expands);
      const T* matrices[2] = {gate, up};
      aerie::share_product<T, 2, TILES, WARPS>(matrices, tile, H, rows, middle_norm, warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, output = element % 16;
        const float inverse = inverse_of(0, WARPS, row), gated = inverse * total_of(0, 0, WARPS, row, output);
        const float value = gated / (1.0f + expf(-gated)) * inverse * total_of(1, 0, WARPS, row, output);
        inner[row * INNER + tile * 16 + output] = static_cast<T>(value);
      }
      __syncthreads();
    }
    if (!meet()) return;

    for (int tile = blockIdx.x; tile < H / 16; tile += BLOCKS) {
      point_at(inner, INNER, expands);
      const T* matrix = down;
      aerie::share_product<T, 1, TILES, WARPS>(
          &matrix, tile, INNER, rows, static_cast<const T*>(nullptr), warp, WARPS, partial, energy);
      __syncthreads();
      for (int element = threadIdx.x; element < expands * 16; element += THREADS) {
        const int row = element / 16, column = tile * 16 + element % 16;
        T* out = level < 0 ? newest : handed_on + (level * WIDTH + row) * H;
        out[column] = static_cast<T>(
            static_cast<float>(middle[row * H + column]) + total_of(0, 0, WARPS, row, element % 16));
      }
      __syncthreads();
    }
    if (!meet()) return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) answer[2 * children + (depths - 1) * WIDTH] = 0;
"""
