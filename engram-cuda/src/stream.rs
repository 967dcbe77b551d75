//! Streams, borrowed streams, events and captured graphs.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::device::Device;
use crate::driver;
use crate::error::{DriverError, Error};
use crate::prefetch_state::Scope;
use crate::sys;

/// A stream of this crate's own: non-blocking, so the legacy default stream does not wait for it.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as for `Send`.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream of default priority.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self, Error> {
        let _bound = device.bind()?;
        // SAFETY: the context is current.
        let raw = unsafe { driver::create_stream(0) }?;
        Ok(Self { device: device.clone(), raw })
    }

    /// The stream as calls take it.
    #[must_use]
    pub fn as_ref(&self) -> StreamRef<'_> {
        StreamRef { raw: self.raw, _owner: PhantomData }
    }

    /// Waits for the stream's work.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.as_ref().synchronize(&self.device)
    }

    /// Records what `work` enqueues on this stream into a graph, instead of running it.
    ///
    /// # Errors
    /// What `work` returns, or [`Error::Driver`] when the capture was broken (an unjoined side stream, say).
    pub fn capture(&self, work: impl FnOnce(StreamRef<'_>) -> Result<(), Error>) -> Result<Graph, Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream is live.
        unsafe { driver::begin_capture(self.raw) }?;
        let done = work(self.as_ref());
        // SAFETY: the stream is live and in capture. A broken capture ends here too, and gives no graph.
        let ended = unsafe { driver::end_capture(self.raw) };
        let graph = match (done, ended) {
            (Ok(()), Ok(graph)) => graph,
            (Err(error), Ok(graph)) => {
                // SAFETY: the graph is this function's own.
                let _ = unsafe { driver::destroy_graph(graph) };
                return Err(error);
            }
            (Err(error), Err(_)) => return Err(error),
            (Ok(()), Err(error)) => return Err(error.into()),
        };
        // SAFETY: the graph is live.
        let exec = unsafe { driver::instantiate(graph) };
        // SAFETY: the graph is this function's own; the instance does not need it.
        let _ = unsafe { driver::destroy_graph(graph) };
        Ok(Graph { device: self.device.clone(), exec: exec? })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is this value's own; the driver finishes its work before it goes.
        self.device.release(|| unsafe { driver::destroy_stream(self.raw) });
    }
}

/// A stream that somebody owns: a [`Stream`] of this crate, or a foreign `CUstream` (`cudaStream_t` is the same handle).
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    raw: sys::CUstream,
    _owner: PhantomData<&'a Stream>,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for StreamRef<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamRef<'_> {}

impl StreamRef<'_> {
    /// Borrows a foreign stream. Null is the legacy default stream, as everywhere in CUDA.
    ///
    /// # Safety
    /// `raw` is a live stream for the whole lifetime of the result, in the primary context of the device that it is used with.
    #[must_use]
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self { raw: raw.cast(), _owner: PhantomData }
    }

    /// The raw `CUstream`.
    #[must_use]
    pub fn as_raw(self) -> *mut c_void {
        self.raw.cast()
    }

    pub(crate) fn handle(self) -> sys::CUstream {
        self.raw
    }

    /// Waits for the stream's work.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn synchronize(self, device: &Device) -> Result<(), Error> {
        let _bound = device.bind()?;
        // SAFETY: the stream is live for this lifetime.
        Ok(unsafe { driver::synchronize_stream(self.raw) }?)
    }

    /// Whether all work enqueued so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn is_idle(self, device: &Device) -> Result<bool, Error> {
        let _bound = device.bind()?;
        // SAFETY: the stream is live for this lifetime.
        Ok(unsafe { driver::stream_is_idle(self.raw) }?)
    }

    /// Whether calls on this stream are recorded by a capture now, and by which.
    ///
    /// # Errors
    /// [`Error::Driver`], also where an earlier error has broken the capture.
    pub fn scope(self, device: &Device) -> Result<Scope, Error> {
        let _bound = device.bind()?;
        Ok(Scope(self.capture()?))
    }

    /// The id of the capture that the stream takes part in, unique in the process.
    pub(crate) fn capture(self) -> Result<Option<u64>, DriverError> {
        // SAFETY: the stream is live for this lifetime.
        unsafe { driver::capture_id(self.raw) }
    }

    /// Makes what is enqueued from now on wait for the event's last recording.
    pub(crate) fn wait(self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: stream and event are live.
        unsafe { driver::stream_wait(self.raw, event.raw) }
    }

    pub(crate) fn record(self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: stream and event are live.
        unsafe { driver::record_event(event.raw, self.raw) }
    }

    /// Refuses a stream of another context. The two default streams belong to whichever context is current, so to the device's.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; [`Error::Driver`].
    pub fn check_device(self, device: &Device) -> Result<(), Error> {
        const HIGHEST_DEFAULT_STREAM: usize = 2;
        if self.raw.addr() <= HIGHEST_DEFAULT_STREAM {
            return Ok(());
        }
        // SAFETY: the stream is live for this lifetime.
        let context = unsafe { driver::stream_context(self.raw) }?;
        if context == device.context() {
            return Ok(());
        }
        Err(Error::WrongDevice { what: "the stream", found: "another context".to_owned(), expected: device.ordinal() })
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: the driver lets any thread use an event.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Event {
    /// An event without a time stamp.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::create(device, false)
    }

    /// An event that [`Event::elapsed_us`] can read.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn with_time(device: &Device) -> Result<Self, Error> {
        Self::create(device, true)
    }

    fn create(device: &Device, timing: bool) -> Result<Self, Error> {
        let _bound = device.bind()?;
        // SAFETY: the context is current.
        let raw = unsafe { driver::create_event(timing) }?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Marks the point that the stream's work has reached when this is enqueued.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn record(&self, stream: StreamRef<'_>) -> Result<(), Error> {
        let _bound = self.device.bind()?;
        Ok(stream.record(self)?)
    }

    /// Whether the last recording was reached; true for an event that was never recorded.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn is_reached(&self) -> Result<bool, Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is live.
        Ok(unsafe { driver::event_is_reached(self.raw) }?)
    }

    /// Waits until the last recording is reached.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is live.
        Ok(unsafe { driver::synchronize_event(self.raw) }?)
    }

    /// Microseconds from `start` to this event; both were made by [`Event::with_time`] and reached.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn elapsed_us(&self, start: &Self) -> Result<f64, Error> {
        let _bound = self.device.bind()?;
        // SAFETY: both events are live.
        let milliseconds = unsafe { driver::elapsed_milliseconds(start.raw, self.raw) }?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own; the driver keeps it until its recording is reached.
        self.device.release(|| unsafe { driver::destroy_event(self.raw) });
    }
}

/// An event, and the scope in which it was recorded last: a capture may wait for its own events only.
#[derive(Debug)]
pub struct Mark {
    event: Event,
    recorded: Option<Scope>,
}

impl Mark {
    /// A mark that was not recorded yet.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { event: Event::new(device)?, recorded: None })
    }

    /// Marks the point that the stream's work has reached; `scope` is the stream's ([`StreamRef::scope`]).
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn record(&mut self, stream: StreamRef<'_>, scope: Scope) -> Result<(), Error> {
        self.event.record(stream)?;
        self.recorded = Some(scope);
        Ok(())
    }

    /// Makes `stream` wait for the mark. Nothing to do where it was never set, or set in another scope: graphs are ordered by their launches.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn before(&self, stream: StreamRef<'_>, scope: Scope) -> Result<(), Error> {
        if self.recorded != Some(scope) {
            return Ok(());
        }
        let _bound = self.event.device.bind()?;
        Ok(stream.wait(&self.event)?)
    }
}

/// A captured graph, ready to launch.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    exec: sys::CUgraphExec,
}

// SAFETY: the driver lets any thread use a graph, one at a time, and `launch` takes `&mut self`.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the graph.
    ///
    /// # Safety
    /// All that the captured work reads and writes still exists: buffers, tables, lookups.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub unsafe fn launch(&mut self, stream: StreamRef<'_>) -> Result<(), Error> {
        let _bound = self.device.bind()?;
        // SAFETY: graph and stream are live, and the caller vouches for what the work uses.
        Ok(unsafe { driver::launch_graph(self.exec, stream.raw) }?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is this value's own; launches in flight keep what they need.
        self.device.release(|| unsafe { driver::destroy_graph_exec(self.exec) });
    }
}
