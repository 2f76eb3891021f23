"""Part of a round's kernel: the best children of each state, and which of them the next depth expands.

Runs within ``source``'s loop over levels, and uses what that declares.
"""

CHOOSE = """    if (level >= 0) {
      // The head: of each state's logits a block keeps the best of its columns, and their sum of exponentials.
      for (int pass = 0; pass < PASSES; ++pass) {
        const int tile = (pass * HEAD_TILES + warp / SPLIT) * BLOCKS + blockIdx.x;
        point_at(states, H, count);
        const T* matrix = head;
        aerie::share_product<T, 1, TILES, WARPS>(
            &matrix, tile < VOCAB / 16 ? tile : 0, H, rows, final_norm, warp % SPLIT, SPLIT, partial, energy);
        __syncthreads();
        for (int element = threadIdx.x; element < count * HEAD_TILES * 16; element += THREADS) {
          const int row = element / (HEAD_TILES * 16), column = element % (HEAD_TILES * 16), from = column / 16 * SPLIT;
          const float value = SCALE * total_of(0, from, from + SPLIT, row, column % 16) *
              inverse_of(from, from + SPLIT, row);
          const bool exists = (pass * HEAD_TILES + column / 16) * BLOCKS + blockIdx.x < VOCAB / 16;
          logits[row * COLUMNS + pass * HEAD_TILES * 16 + column] = exists && !isnan(value) ? value : lowest;
        }
        __syncthreads();
      }
      for (int row = warp; row < count; row += WARPS) {
        const float* own = logits + row * COLUMNS;
        float peak = lowest, sum = 0.0f;
        for (int column = lane; column < COLUMNS; column += 32) peak = fmaxf(peak, own[column]);
        peak = aerie::max_lanes(peak);
        for (int column = lane; column < COLUMNS; column += 32) {
          sum += own[column] == lowest ? 0.0f : expf(own[column] - peak);
          int rank = 0;
          for (int other = 0; other < COLUMNS; ++other) {
            rank += own[other] > own[column] || (own[other] == own[column] && other < column);
          }
          if (rank >= WIDTH) continue;
          const int entry = (row * BLOCKS + blockIdx.x) * WIDTH + rank;
          list_values[entry] = own[column];
          list_ids[entry] = (column / 16 * BLOCKS + blockIdx.x) * 16 + column % 16;
        }
        sum = aerie::sum_lanes(sum);
        if (lane == 0) {
          list_sums[(row * BLOCKS + blockIdx.x) * 2] = peak;
          list_sums[(row * BLOCKS + blockIdx.x) * 2 + 1] = sum;
        }
      }
      if (!meet()) return;

      // The best children of a state: those of the lists with the best first entries, in the order (value, id).
      for (int row = blockIdx.x; row < count; row += BLOCKS) {
        float *firsts = partial, *values = firsts + BLOCKS;
        int* first_ids = reinterpret_cast<int*>(values + LISTS * WIDTH);
        int *lists = first_ids + BLOCKS, *ids = lists + LISTS;
        const float* own_values = list_values + row * BLOCKS * WIDTH;
        const int* own_ids = list_ids + row * BLOCKS * WIDTH;
        const float* own_sums = list_sums + row * BLOCKS * 2;
        for (int list = threadIdx.x; list < BLOCKS; list += THREADS) {
          firsts[list] = own_values[list * WIDTH];
          first_ids[list] = own_ids[list * WIDTH];
        }
        __syncthreads();
        for (int list = threadIdx.x; list < BLOCKS; list += THREADS) {
          int rank = 0;
          for (int other = 0; other < BLOCKS; ++other) {
            const bool tie = firsts[other] == firsts[list];
            rank += firsts[other] > firsts[list] || (tie && first_ids[other] < first_ids[list]);
          }
          if (rank < LISTS) lists[rank] = list;
        }
        if (warp == 0) {
          float peak = lowest, sum = 0.0f;
          for (int list = lane; list < BLOCKS; list += 32) peak = fmaxf(peak, own_sums[list * 2]);
          peak = aerie::max_lanes(peak);
          for (int list = lane; list < BLOCKS; list += 32) {
            if (own_sums[list * 2 + 1] > 0.0f) sum += own_sums[list * 2 + 1] * expf(own_sums[list * 2] - peak);
          }
          sum = aerie::sum_lanes(sum);
          if (lane == 0) energy[0] = peak + logf(sum);
        }
        __syncthreads();
        for (int entry = threadIdx.x; entry < LISTS * WIDTH; entry += THREADS) {
          values[entry] = own_values[lists[entry / WIDTH] * WIDTH + entry % WIDTH];
          ids[entry] = own_ids[lists[entry / WIDTH] * WIDTH + entry % WIDTH];
        }
        __syncthreads();
        for (int entry = threadIdx.x; entry < LISTS * WIDTH; entry += THREADS) {
          int rank = 0;
          for (int other = 0; other < LISTS * WIDTH; ++other) {
            rank += values[other] > values[entry] || (values[other] == values[entry] && ids[other] < ids[entry]);
          }
          if (rank >= WIDTH) continue;
          const float log_prob = values[entry] - energy[0];
          const int child = base + row * WIDTH + rank;
          answer[child] = grown[child] = __float_as_int(log_prob);
          answer[children + child] = grown[children + child] = labels[ids[entry]];
        }
        __syncthreads();
      }
      if (!meet()) return;
      if (level == depths - 1) break;

      // The frontier, in every block: see kernels.frontier.
      for (int child = threadIdx.x; child < count * WIDTH; child += THREADS) {
        totals[child] = scores[child / WIDTH] + __int_as_float(grown[base + child]);
      }
      __syncthreads();
      for (int child = threadIdx.x; child < count * WIDTH; child += THREADS) {
        const bool lost = isnan(totals[child]);
        const float own = lost ? lowest : totals[child];
        int rank = 0;
        for (int other = 0; other < count * WIDTH; ++other) {
          const bool gone = isnan(totals[other]);
          const float value = gone ? lowest : totals[other];
          rank += value > own || (value == own && (gone < lost || (gone == lost && other < child)));
        }
        if (rank >= WIDTH) continue;
        all_parents[level * WIDTH + rank] = child / WIDTH;
        tokens[rank] = grown[children + base + child];
        scores[rank] = totals[child];
        if (blockIdx.x == 0) answer[2 * children + level * WIDTH + rank] = child;
      }
      __syncthreads();

    }
"""
