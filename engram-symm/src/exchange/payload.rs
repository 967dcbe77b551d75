//! The ids and rows of one exchange in host memory.

use std::ops::Range;

use engram_core::Ownership;
use engram_ple::SourceError;

use super::config::Part;
use super::ids::Ids;
use super::output::Buffers;
use super::segment::Area;
use super::{Plan, Scratch};
use crate::memory::Memory;
use crate::protocol::{Call, Operation, Payload};

pub(super) struct HostPayload<'a, M> {
    pub(super) memory: &'a M,
    pub(super) plan: &'a Plan,
    pub(super) parts: &'a [Part],
    pub(super) ids: Ids<'a>,
    pub(super) push: bool,
    pub(super) slot: usize,
    pub(super) scratch: &'a mut Scratch,
    pub(super) output: &'a mut Buffers,
}

/// A table that could not be read, and its layer.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) layer: usize,
    pub(super) source: SourceError,
}

impl<M: Memory> Payload for HostPayload<'_, M> {
    type Error = Unread;

    fn publish(&mut self, call: Call) {
        debug_assert_eq!(self.push, call.operation == Operation::Push);
        self.clear_unowned();
        if self.push {
            let own = self.plan.rank;
            (0..self.plan.world).filter(|&owner| owner != own).for_each(|owner| self.publish_to(owner));
        } else {
            let area = Area::new(self.memory, self.plan.rank, &self.plan.segment.ids);
            let token_ids = self.plan.layers.len() * self.plan.columns;
            for token in 0..self.slot {
                area.write(token * token_ids * 4, self.token_ids(token));
            }
        }
    }

    fn serve(&mut self, requester: usize) -> Result<(), Unread> {
        let run = self.plan.columns_of(self.plan.rank).len();
        if run == 0 || self.parts.is_empty() {
            return Ok(());
        }
        let at_once = (self.plan.batch_ids / run).max(1);
        for layer in 0..self.plan.layers.len() {
            for first in (0..self.slot).step_by(at_once) {
                let count = at_once.min(self.slot - first);
                self.read_ids(requester, layer, first, count);
                let served = match self.plan.layers[layer].ownership {
                    Ownership::Heads(_) => self.serve_heads(requester, layer, first, count),
                    Ownership::Rows(_) => self.serve_rows(requester, layer, first, count),
                };
                served.map_err(|source| Unread { layer, source })?;
            }
        }
        Ok(())
    }

    fn collect(&mut self, owner: usize) {
        if owner == self.plan.rank {
            // Served straight to the output.
            return;
        }
        let tokens = self.ids.tokens();
        for token in 0..tokens {
            for layer in 0..self.plan.layers.len() {
                match self.plan.layers[layer].ownership {
                    Ownership::Heads(_) => {
                        let columns = self.plan.columns_of(owner);
                        self.take(owner, token, layer, columns.start, columns.len());
                    }
                    Ownership::Rows(shards) => {
                        let ids = &self.ids.token(token)[layer * self.plan.columns..][..self.plan.columns];
                        for (column, &id) in ids.iter().enumerate() {
                            if shards.owner_of(id.into()) == Some(owner) {
                                self.take(owner, token, layer, column, 1);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<M: Memory> HostPayload<'_, M> {
    /// The ids of one token of the slot, `[layers][columns]`; of one past the last, none.
    fn token_ids(&self, token: usize) -> &[i32] {
        if token < self.ids.tokens() { self.ids.token(token) } else { &self.plan.no_ids }
    }

    /// Makes zero rows of what no owner will send.
    fn clear_unowned(&mut self) {
        self.output.clear_scales(self.slot);
        self.output.clear(self.ids.tokens()..self.slot);
        for (layer, of_layer) in self.plan.layers.iter().enumerate() {
            let Ownership::Rows(shards) = of_layer.ownership else { continue };
            for token in 0..self.ids.tokens() {
                let ids = &self.ids.token(token)[layer * self.plan.columns..][..self.plan.columns];
                for (column, &id) in ids.iter().enumerate() {
                    if shards.owner_of(id.into()).is_none() {
                        self.output.write(&of_layer.format, layer, token, column, &self.plan.zero_row);
                    }
                }
            }
        }
    }

    /// `Push`: writes the ids that concern `owner` into its memory.
    fn publish_to(&self, owner: usize) {
        let columns = self.plan.columns_of(owner);
        let area = Area::new(self.memory, owner, &self.plan.segment.pushed_ids);
        for token in 0..self.slot {
            for (layer, ids) in self.token_ids(token).chunks_exact(self.plan.columns).enumerate() {
                let at = self.plan.pushed_index(self.plan.rank, token, layer, columns.len());
                area.write(at * 4, &ids[columns.clone()]);
            }
        }
    }

    /// Reads the ids of `requester` that concern this rank, for one layer and `count` tokens: `[count][own columns]`.
    fn read_ids(&mut self, requester: usize, layer: usize, first: usize, count: usize) {
        let columns = self.plan.columns_of(self.plan.rank);
        let segment = &self.plan.segment;
        for token in first..first + count {
            let ids = &mut self.scratch.ids[(token - first) * columns.len()..][..columns.len()];
            if requester == self.plan.rank {
                let token_ids = if token < self.ids.tokens() { self.ids.token(token) } else { &self.plan.no_ids };
                ids.copy_from_slice(&token_ids[layer * self.plan.columns..][columns.clone()]);
            } else if self.push {
                let at = self.plan.pushed_index(requester, token, layer, columns.len());
                Area::new(self.memory, self.plan.rank, &segment.pushed_ids).read(at * 4, ids);
            } else {
                let at = self.plan.index(token, layer, columns.start);
                Area::new(self.memory, requester, &segment.ids).read(at * 4, ids);
            }
        }
    }

    /// Looks up all own columns; an id that is no row of this rank's gives a zero row.
    fn serve_heads(&mut self, requester: usize, layer: usize, first: usize, count: usize) -> Result<(), SourceError> {
        let (columns, row_bytes) = (self.plan.columns_of(self.plan.rank), self.plan.row_bytes());
        let part = &self.parts[layer];
        let ids = &mut self.scratch.ids[..count * columns.len()];
        ids.iter_mut().for_each(|id| *id = part.local(*id).unwrap_or(-1));
        let rows = &mut self.scratch.rows[..ids.len() * row_bytes];
        part.source.gather(ids, rows)?;

        let run = columns.len() * row_bytes;
        for index in 0..count {
            self.give(requester, first + index, layer, columns.start, index * run..(index + 1) * run);
        }
        Ok(())
    }

    /// Looks up the ids that are rows of this rank's; the others are somebody else's, or nobody's.
    fn serve_rows(&mut self, requester: usize, layer: usize, first: usize, count: usize) -> Result<(), SourceError> {
        let Ownership::Rows(shards) = self.plan.layers[layer].ownership else { unreachable!("rows are owned") };
        let (columns, row_bytes) = (self.plan.columns, self.plan.row_bytes());
        let part = &self.parts[layer];
        let Scratch { ids, places, rows, .. } = &mut *self.scratch;
        places.clear();
        for place in 0..count * columns {
            let id = ids[place];
            if shards.owner_of(id.into()) == Some(self.plan.rank)
                && let Some(local) = part.local(id)
            {
                ids[places.len()] = local;
                places.push(place);
            }
        }
        part.source.gather(&ids[..places.len()], &mut rows[..places.len() * row_bytes])?;

        for index in 0..self.scratch.places.len() {
            let (token, column) = (self.scratch.places[index] / columns, self.scratch.places[index] % columns);
            self.give(requester, first + token, layer, column, index * row_bytes..(index + 1) * row_bytes);
        }
        Ok(())
    }

    /// Puts looked-up rows, from `at` bytes on in the scratch, where `requester` takes them: rows of own columns that
    /// follow each other, from `column` on.
    fn give(&mut self, requester: usize, token: usize, layer: usize, column: usize, at: Range<usize>) {
        let rows = &self.scratch.rows[at];
        let segment = &self.plan.segment;
        let own = self.plan.columns_of(self.plan.rank);
        let row_bytes = self.plan.row_bytes();
        if requester == self.plan.rank {
            self.output.write(&self.plan.layers[layer].format, layer, token, column, rows);
        } else if self.push {
            let index = self.plan.index(token, layer, column);
            Area::new(self.memory, requester, &segment.pushed_rows).write(index * row_bytes, rows);
        } else {
            let index = self.plan.own_index(self.slot, requester, token, layer, own.len()) + (column - own.start);
            Area::new(self.memory, self.plan.rank, &segment.rows).write(index * row_bytes, rows);
        }
    }

    /// Takes `count` rows of `owner`, of columns that follow each other, from `column` on.
    fn take(&mut self, owner: usize, token: usize, layer: usize, column: usize, count: usize) {
        let segment = &self.plan.segment;
        let own = self.plan.columns_of(owner);
        let (area, index) = if self.push {
            (Area::new(self.memory, self.plan.rank, &segment.pushed_rows), self.plan.index(token, layer, column))
        } else {
            let index = self.plan.own_index(self.slot, self.plan.rank, token, layer, own.len()) + (column - own.start);
            (Area::new(self.memory, owner, &segment.rows), index)
        };
        let row_bytes = self.plan.row_bytes();
        let rows = count * row_bytes;
        if let Some(out) = self.output.packed(layer, token, column, rows) {
            return area.read(index * row_bytes, out);
        }
        let rows = &mut self.scratch.run[..rows];
        area.read(index * row_bytes, rows);
        self.output.write(&self.plan.layers[layer].format, layer, token, column, rows);
    }
}
