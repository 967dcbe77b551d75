//! The order in which prefetch calls may come, apart from what they enqueue.

use std::fmt;

/// Where a call was made: inside the capture with this id, or outside any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope(pub(crate) Option<u64>);

impl Scope {
    /// The capture's id, unique in the process; none outside any.
    #[must_use]
    pub fn capture(self) -> Option<u64> {
        self.0
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(id) => write!(f, "inside capture {id}"),
            None => f.write_str("outside any capture"),
        }
    }
}

/// Prefetch calls in an order that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefetchError {
    /// `finish` without a `start`.
    #[error("finish of layer {layer} without a start: call start with this step's ids first")]
    NotStarted {
        /// The layer.
        layer: usize,
    },
    /// A second `start` while layers of the first one were not finished.
    #[error(
        "start, but {unfinished} of {layers} layers of the last start are not finished: finish them, or abandon that start"
    )]
    Started {
        /// Layers not yet finished.
        unfinished: usize,
        /// Layers in all.
        layers: usize,
    },
    /// The capture of a `start` ended before its layers were finished; the driver has refused that capture as unjoined.
    #[error(
        "the last start was made {began}, which ended with {unfinished} of {layers} layers not finished, so that capture \
         was refused as unjoined; that start is given up now: finish every layer before the capture ends"
    )]
    CaptureEnded {
        /// Where it was made.
        began: Scope,
        /// Layers not finished.
        unfinished: usize,
        /// Layers in all.
        layers: usize,
    },
    /// `finish` in another capture than its `start`, or only one of the two in a capture.
    #[error(
        "finish of layer {layer} {now}, but its start was made {began}: make both in the same capture, \
         or both outside (between the launches of graph segments)"
    )]
    OtherScope {
        /// The layer.
        layer: usize,
        /// Where the start was made.
        began: Scope,
        /// Where the finish was made.
        now: Scope,
    },
    /// A layer that the prefetcher does not have.
    #[error("layer {layer}, but there are {layers}")]
    Layer {
        /// The layer asked for.
        layer: usize,
        /// Layers in all.
        layers: usize,
    },
    /// A layer finished twice.
    #[error("layer {layer} was finished already: its rows stay where they are until the next start")]
    Finished {
        /// The layer.
        layer: usize,
    },
    /// `finish` with ids of another shape than `start` had.
    #[error("finish with {found} tokens, but start had {started}")]
    Tokens {
        /// Tokens of the finish.
        found: usize,
        /// Tokens of the start.
        started: usize,
    },
}

/// One of the dependencies that keep a prefetch right, for tests that show what happens without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), expect(unreachable_pub, reason = "public with the feature alone"))]
pub enum Dependency {
    /// The side stream waits for the work that writes the ids.
    Producer,
    /// The ids are copied before the caller may overwrite them.
    IdLifetime,
    /// The caller's stream waits for the rows.
    Consumer,
}

#[derive(Debug)]
struct Started {
    scope: Scope,
    tokens: usize,
    finished: usize,
}

/// Starts and finishes of one prefetcher, apart from what they enqueue.
///
/// A start opens a step, each layer is finished once, in the scope of the start and in any order; then the next start may come.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(unreachable_pub, reason = "public with the feature alone"))]
pub struct Order {
    started: Option<Started>,
    /// Layers finished since the start. Kept beside, so that starting allocates nothing.
    finished: Vec<bool>,
    /// What a test leaves out.
    omitted: Option<Dependency>,
}

#[cfg_attr(not(feature = "cuda"), expect(unreachable_pub, reason = "public with the feature alone"))]
impl Order {
    /// Before the first start of a prefetcher of so many layers.
    #[must_use]
    pub fn new(layers: usize) -> Self {
        Self { started: None, finished: vec![false; layers], omitted: None }
    }

    /// Whether a start may come here: no layer is open.
    ///
    /// # Errors
    /// [`PrefetchError::Started`]; [`PrefetchError::CaptureEnded`], which gives the lost start up.
    pub fn may_start(&mut self, scope: Scope) -> Result<(), PrefetchError> {
        let layers = self.finished.len();
        if let Some(last) = self.started.as_ref().filter(|last| last.finished < layers) {
            let (began, unfinished) = (last.scope, layers - last.finished);
            if began.0.is_some() && began != scope {
                self.started = None;
                return Err(PrefetchError::CaptureEnded { began, unfinished, layers });
            }
            return Err(PrefetchError::Started { unfinished, layers });
        }
        Ok(())
    }

    /// A start of `tokens` tokens.
    ///
    /// # Errors
    /// As [`Order::may_start`].
    pub fn start(&mut self, scope: Scope, tokens: usize) -> Result<(), PrefetchError> {
        self.may_start(scope)?;
        self.started = Some(Started { scope, tokens, finished: 0 });
        self.finished.fill(false);
        Ok(())
    }

    /// Whether a layer may be finished here; [`Order::finished`] then notes that it was.
    ///
    /// # Errors
    /// Any other [`PrefetchError`], which says what to do.
    pub fn may_finish(&self, layer: usize, scope: Scope, tokens: usize) -> Result<(), PrefetchError> {
        let layers = self.finished.len();
        let Some(&done) = self.finished.get(layer) else {
            return Err(PrefetchError::Layer { layer, layers });
        };
        let Some(start) = &self.started else { return Err(PrefetchError::NotStarted { layer }) };
        if start.scope != scope {
            return Err(PrefetchError::OtherScope { layer, began: start.scope, now: scope });
        }
        if done {
            return Err(PrefetchError::Finished { layer });
        }
        if start.tokens != tokens {
            return Err(PrefetchError::Tokens { found: tokens, started: start.tokens });
        }
        Ok(())
    }

    /// Notes that a layer was finished.
    pub fn finished(&mut self, layer: usize) {
        if let (Some(start), Some(done)) = (&mut self.started, self.finished.get_mut(layer)) {
            start.finished += usize::from(!*done);
            *done = true;
        }
    }

    /// Tokens of the start in progress, and where it was made.
    #[must_use]
    pub fn pending(&self) -> Option<(usize, Scope)> {
        self.started
            .as_ref()
            .filter(|start| start.finished < self.finished.len())
            .map(|start| (start.tokens, start.scope))
    }

    /// Whether a dependency is kept: each of them, unless a test leaves it out.
    #[must_use]
    pub fn keeps(&self, dependency: Dependency) -> bool {
        self.omitted != Some(dependency)
    }

    /// Leaves a dependency out, so that a test can show that it is needed.
    #[cfg(feature = "fault-injection")]
    pub fn omit(&mut self, dependency: Option<Dependency>) {
        self.omitted = dependency;
    }

    /// Gives the last start up.
    pub fn abandon(&mut self) {
        self.started = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EAGER: Scope = Scope(None);

    fn finish(order: &mut Order, layer: usize, scope: Scope) -> Result<(), PrefetchError> {
        order.may_finish(layer, scope, 5)?;
        order.finished(layer);
        Ok(())
    }

    #[test]
    fn rounds_follow_each_other_eagerly_and_in_captures() {
        let mut order = Order::new(2);
        for scope in [EAGER, EAGER, Scope(Some(1)), Scope(Some(1)), Scope(Some(2)), EAGER] {
            order.start(scope, 5).unwrap();
            finish(&mut order, 1, scope).unwrap();
            finish(&mut order, 0, scope).unwrap();
            assert_eq!(order.pending(), None);
        }
    }

    #[test]
    fn a_finish_needs_a_start() {
        let mut order = Order::new(2);
        assert_eq!(finish(&mut order, 1, EAGER), Err(PrefetchError::NotStarted { layer: 1 }));
        assert_eq!(finish(&mut order, 2, EAGER), Err(PrefetchError::Layer { layer: 2, layers: 2 }));
        order.start(EAGER, 5).unwrap();
        finish(&mut order, 0, EAGER).unwrap();
        assert_eq!(finish(&mut order, 0, EAGER), Err(PrefetchError::Finished { layer: 0 }));
        assert_eq!(order.may_finish(1, EAGER, 6), Err(PrefetchError::Tokens { found: 6, started: 5 }));
    }

    #[test]
    fn a_second_start_counts_what_is_open_until_it_is_abandoned() {
        let mut order = Order::new(3);
        order.start(EAGER, 5).unwrap();
        finish(&mut order, 1, EAGER).unwrap();
        assert_eq!(order.start(EAGER, 5), Err(PrefetchError::Started { unfinished: 2, layers: 3 }));
        finish(&mut order, 0, EAGER).unwrap();
        order.abandon();
        assert_eq!(finish(&mut order, 2, EAGER), Err(PrefetchError::NotStarted { layer: 2 }));
        order.start(EAGER, 5).unwrap();
    }

    #[test]
    fn a_finish_elsewhere_names_both_places() {
        for (began, now) in [(EAGER, Scope(Some(7))), (Scope(Some(7)), EAGER), (Scope(Some(7)), Scope(Some(8)))] {
            let mut order = Order::new(1);
            order.start(began, 5).unwrap();
            let error = finish(&mut order, 0, now).unwrap_err();
            assert_eq!(error, PrefetchError::OtherScope { layer: 0, began, now });
            assert!(error.to_string().contains("same capture"));
            finish(&mut order, 0, began).unwrap();
        }
    }

    #[test]
    fn the_start_after_a_capture_that_ended_unfinished_says_why_and_the_next_one_works() {
        for next in [EAGER, Scope(Some(8))] {
            let mut order = Order::new(2);
            order.start(Scope(Some(7)), 5).unwrap();
            finish(&mut order, 0, Scope(Some(7))).unwrap();
            let error = order.start(next, 5).unwrap_err();
            assert_eq!(error, PrefetchError::CaptureEnded { began: Scope(Some(7)), unfinished: 1, layers: 2 });
            assert!(error.to_string().contains("unjoined"));
            order.start(next, 5).unwrap();
        }
    }

    #[test]
    fn an_eager_start_is_not_lost_by_a_capture_that_begins_after_it() {
        let mut order = Order::new(1);
        order.start(EAGER, 5).unwrap();
        assert_eq!(order.start(Scope(Some(1)), 5), Err(PrefetchError::Started { unfinished: 1, layers: 1 }));
    }
}
