//! Judging the hash constants that a PLE checkpoint stores beside its table.

use engram_core::{ConstantsError, LayerLayout};
use safetensors::Dtype;

use crate::checkpoint::names::Constant;
use crate::error::Error;
use crate::prove::report::{Fault, FaultCode};
use crate::prove::table::Sound;

/// What is stored for one layer, and what the config gives for it.
pub(crate) struct Stored<'a, 'f> {
    pub(crate) layer: &'f LayerLayout,
    pub(crate) tensor: &'f dyn Fn(Constant) -> Option<Sound<'a>>,
}

/// One stored list.
struct List<'a> {
    tensor: Sound<'a>,
    values: Vec<i64>,
    computed: Vec<i64>,
}

impl<'a> Stored<'a, '_> {
    /// Judges what is stored. With `allow`, gives the constants that are to be used in place of the computed ones.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn judge(&self, allow: bool, faults: &mut Vec<Fault>) -> Result<Option<LayerLayout>, Error> {
        let before = faults.len();
        let wide = |list: &[u32]| list.iter().map(|&value| i64::from(value)).collect();
        let multipliers = self.list(Constant::Multipliers, self.layer.multipliers().to_vec(), faults)?;
        let sizes = self.list(Constant::Sizes, wide(self.layer.sizes()), faults)?;
        let offsets = self.list(Constant::Offsets, wide(self.layer.offsets()), faults)?;

        // Each kind is judged with computed constants in the place of the other, so that both faults come out.
        let others = (self.layer.multipliers(), wide(self.layer.sizes()), wide(self.layer.offsets()));
        let used =
            |list: &Option<List<'a>>, computed: &[i64]| list.as_ref().map_or(computed.to_vec(), |l| l.values.clone());
        let m = used(&multipliers, others.0);
        let (s, o) = (used(&sizes, &others.1), used(&offsets, &others.2));
        let make = |m: &[i64], s: &[i64], o: &[i64]| {
            LayerLayout::from_constants(self.layer.layer(), m, s, o, self.layer.padded_rows())
        };
        let mut invalid = |list: Option<&List<'a>>, error: &ConstantsError| {
            faults.extend(list.map(|list| list.tensor.fault(FaultCode::ConstantsInvalid, error.to_string())));
        };
        let multipliers_fit = make(&m, &others.1, &others.2);
        if let Err(error) = &multipliers_fit {
            invalid(multipliers.as_ref(), error);
        }
        let (mut sizes_fit, mut offsets_fit) = (true, true);
        match make(others.0, &s, &o) {
            Ok(_) => {}
            Err(error @ ConstantsError::Size { .. }) => {
                sizes_fit = false;
                invalid(sizes.as_ref(), &error);
                if let Err(error) = make(others.0, &others.1, &o) {
                    offsets_fit = false;
                    invalid(offsets.as_ref(), &error);
                }
            }
            Err(error) => {
                let moved = offsets.as_ref().filter(|list| list.differs());
                (sizes_fit, offsets_fit) = (moved.is_some(), moved.is_none());
                invalid(moved.or(sizes.as_ref()).or(offsets.as_ref()), &error);
            }
        }
        // A list that no table can have is not compared with the config's, too.
        let judged = [(&multipliers, multipliers_fit.is_ok()), (&sizes, sizes_fit), (&offsets, offsets_fit)];
        let fit = judged.iter().all(|(_, fits)| *fits);
        faults.extend(judged.iter().filter(|(_, fits)| *fits).filter_map(|(list, _)| list.as_ref()?.mismatch()));
        Ok(if allow && fit && faults.len() > before { make(&m, &s, &o).ok() } else { None })
    }

    /// Reads one list, if it is stored in the right form.
    fn list(&self, constant: Constant, computed: Vec<i64>, faults: &mut Vec<Fault>) -> Result<Option<List<'a>>, Error> {
        let Some(tensor) = (self.tensor)(constant) else { return Ok(None) };
        let (dtype, shape) = (tensor.info.dtype(), tensor.info.shape());
        if dtype.defined() != Some(Dtype::I64) || *shape != [computed.len() as u64] {
            let message = format!("expected I64 of shape [{}], found {dtype} of shape {shape:?}", computed.len());
            faults.push(tensor.fault(FaultCode::ConstantsInvalid, message));
            return Ok(None);
        }
        let bytes = tensor.file.read(tensor.info.byte_range())?;
        let (elements, _) = bytes.as_chunks::<8>();
        let values = elements.iter().map(|element| i64::from_le_bytes(*element)).collect();
        Ok(Some(List { tensor, values, computed }))
    }
}

impl List<'_> {
    fn differs(&self) -> bool {
        self.values != self.computed
    }

    fn mismatch(&self) -> Option<Fault> {
        let place = self.values.iter().zip(&self.computed).position(|(stored, computed)| stored != computed)?;
        let (stored, computed) = (self.values[place], self.computed[place]);
        let message = format!("expected {computed} at [{place}] by the config, found {stored}");
        Some(self.tensor.fault(FaultCode::ConstantsMismatch, message))
    }
}
