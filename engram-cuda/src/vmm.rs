//! Device memory apart from the addresses at which it is seen.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::device::{Attribute, Device};
use crate::driver;
use crate::error::Error;
use crate::sys;

/// How memory is passed to other processes. What an allocation is made for cannot be changed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandleKind {
    /// As a descriptor, within a node.
    Descriptor,
    /// As a fabric handle, between the nodes of an NVLink domain too.
    Fabric,
}

/// Memory of a device, without an address. It is gone when nobody has it, neither as such nor mapped.
pub struct Physical {
    device: Device,
    handle: u64,
    bytes: usize,
}

impl Physical {
    /// Allocates memory of the device for at least so many bytes, uninitialised.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no such memory; [`Error::Driver`] where there is too little, or where this process may not have
    /// handles of this kind.
    pub fn new(device: &Device, bytes: usize, handles: Option<HandleKind>) -> Result<Self, Error> {
        let _bound = device.bind()?;
        let property = property(device, handles);
        let bytes = rounded(device, bytes, &property)?;
        // SAFETY: the property is one of this device.
        let handle = unsafe { driver::create_memory(bytes, &property) }?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// Takes memory that another process (or this one) has exported, on this or on another device. `bytes` is what the exporter's
    /// [`Physical::bytes`] says.
    ///
    /// # Errors
    /// [`Error::Driver`] for a descriptor of something else, or of memory that this process cannot have.
    pub fn from_descriptor(device: &Device, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self, Error> {
        let _bound = device.bind()?;
        // SAFETY: the descriptor is open; the driver checks what it is.
        let handle = unsafe { driver::import_descriptor(descriptor.as_raw_fd()) }?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// As [`Physical::from_descriptor`], from a fabric handle.
    ///
    /// # Errors
    /// [`Error::Driver`] for bytes that are no handle, or one of memory that this process cannot have.
    pub fn from_fabric(device: &Device, handle: &[u8; 64], bytes: usize) -> Result<Self, Error> {
        let _bound = device.bind()?;
        // SAFETY: the driver checks the handle's bytes.
        let handle = unsafe { driver::import_fabric(*handle) }?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// A descriptor of the memory, closed on exec, which keeps the memory as long as it is open.
    ///
    /// # Errors
    /// [`Error::Driver`], for memory that was not made for it too; [`Error::Descriptor`] where the system refuses.
    pub fn to_descriptor(&self) -> Result<OwnedFd, Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is live.
        let descriptor = unsafe { driver::export_descriptor(self.handle) }?;
        // SAFETY: the driver made the descriptor for this call, and has no other use for it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC)
            .map_err(|errno| Error::Descriptor(errno.into()))?;
        Ok(descriptor)
    }

    /// A fabric handle of the memory.
    ///
    /// # Errors
    /// [`Error::Driver`], for memory that was not made for it too.
    pub fn to_fabric(&self) -> Result<[u8; 64], Error> {
        let _bound = self.device.bind()?;
        // SAFETY: the handle is live.
        Ok(unsafe { driver::export_fabric(self.handle) }?)
    }

    /// Its size in bytes: at least what was asked for, a whole number of the device's pieces.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for Physical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Physical({} bytes)", self.bytes)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own. Mappings keep the memory.
        self.device.release(|| unsafe { driver::release_memory(self.handle) });
    }
}

/// A range of a device's addresses. It stays the same while memory is mapped into it, unmapped, and other memory mapped.
///
/// Dropping it waits for the device. Addresses that are still in use because the device cannot be waited for, in a capture say, are kept.
pub struct Reserved {
    device: Device,
    address: u64,
    bytes: usize,
    mapped: bool,
}

impl Reserved {
    /// Reserves addresses for at least so many bytes. Nothing can be read or written there yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has no such memory; [`Error::Driver`].
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        let _bound = device.bind()?;
        let bytes = rounded(device, bytes, &property(device, None))?;
        // SAFETY: a new range, at an address of the driver's choice.
        let address = unsafe { driver::reserve_addresses(bytes) }?;
        Ok(Self { device: device.clone(), address, bytes, mapped: false })
    }

    /// Maps memory of the same size, which this device may then read and write here. The mapping keeps the memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another size, or when memory is mapped already; [`Error::Driver`] where this device does not reach the memory.
    pub fn map(&mut self, memory: &Physical) -> Result<(), Error> {
        if self.mapped || memory.bytes != self.bytes {
            let why = if self.mapped {
                "memory is mapped there already: unmap it first".to_owned()
            } else {
                format!("there are {} bytes of addresses for {} bytes of memory", self.bytes, memory.bytes)
            };
            return Err(Error::Invalid { what: "the addresses to map memory at", why });
        }
        let _bound = self.device.bind()?;
        // SAFETY: the range is this value's own, and nothing is mapped in it; the memory is live.
        unsafe { driver::map_memory(self.address, self.bytes, memory.handle) }?;
        // SAFETY: the range is mapped as a whole.
        let allowed = unsafe { driver::allow_access(self.address, self.bytes, self.device.handle()) };
        if let Err(error) = allowed {
            // SAFETY: as above; nobody has access yet.
            let _ = unsafe { driver::unmap_memory(self.address, self.bytes) };
            return Err(error.into());
        }
        self.mapped = true;
        Ok(())
    }

    /// Waits for the device and takes the memory away, if some is mapped. The addresses stay.
    ///
    /// # Errors
    /// [`Error::Driver`], with the error of any earlier work that failed; the memory is still mapped then.
    pub fn unmap(&mut self) -> Result<(), Error> {
        if self.mapped {
            let _bound = self.device.bind()?;
            // SAFETY: the context is current.
            unsafe { driver::synchronize_context() }?;
            // SAFETY: memory is mapped in the whole range, and no work of this device uses it any more.
            unsafe { driver::unmap_memory(self.address, self.bytes) }?;
            self.mapped = false;
        }
        Ok(())
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes: at least what was asked for, a whole number of the device's pieces.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether memory is mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapped = if self.mapped { "mapped" } else { "not mapped" };
        write!(f, "Reserved({} bytes at {:#x} on device {}, {mapped})", self.bytes, self.address, self.device.ordinal())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.device.release(|| {
            if self.mapped {
                // SAFETY: the context is current.
                unsafe { driver::synchronize_context() }?;
                // SAFETY: memory is mapped in the whole range, and no work of this device uses it any more.
                unsafe { driver::unmap_memory(self.address, self.bytes) }?;
            }
            // SAFETY: the range is this value's own, and nothing is mapped in it.
            unsafe { driver::free_addresses(self.address, self.bytes) }
        });
    }
}

fn property(device: &Device, handles: Option<HandleKind>) -> sys::AllocationProperty {
    let is = |kind| handles == Some(kind);
    driver::allocation_property(device.handle(), is(HandleKind::Descriptor), is(HandleKind::Fabric))
}

/// `bytes` as a whole number of the pieces in which the device has memory, at least one.
fn rounded(device: &Device, bytes: usize, property: &sys::AllocationProperty) -> Result<usize, Error> {
    if device.attribute(Attribute::VirtualMemory)? == 0 {
        let missing = "cannot map memory at addresses of its own";
        return Err(Error::Unsupported { ordinal: device.ordinal(), missing });
    }
    // SAFETY: the property is one of this device.
    let piece = unsafe { driver::allocation_granularity(property) }?;
    whole_pieces(bytes, piece).ok_or_else(|| Error::Invalid {
        what: "the size of device memory",
        why: format!("{bytes} bytes cannot be addressed"),
    })
}

fn whole_pieces(bytes: usize, piece: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(piece.max(1)).filter(|&bytes| isize::try_from(bytes).is_ok())
}

#[cfg(test)]
mod tests {
    use super::whole_pieces;

    #[test]
    fn sizes_are_whole_pieces_that_can_be_addressed() {
        let piece = 2 << 20;
        assert_eq!(whole_pieces(0, piece), Some(piece));
        assert_eq!(whole_pieces(1, piece), Some(piece));
        assert_eq!(whole_pieces(piece, piece), Some(piece));
        assert_eq!(whole_pieces(piece + 1, piece), Some(2 * piece));
        assert_eq!(whole_pieces(usize::MAX, piece), None);
        assert_eq!(whole_pieces(isize::MAX.unsigned_abs(), piece), None);
    }
}
